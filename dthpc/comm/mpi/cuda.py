"""CUDA tensors: whether MPI takes them as they are."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_SWITCHES = {"MPICH_GPU_SUPPORT_ENABLED": "1", "MV2_USE_CUDA": "1", "MV2_ENABLE_GPU": "1", "PSM2_CUDA": "1"}
"""Variables by which users turn GPU support on in libraries that can't be asked (Cray MPICH, MVAPICH)."""


def aware(mpi: Any) -> bool:
    """Whether the MPI library takes pointers to CUDA memory.

    `DTHPC_MPI_CUDA=0` or `=1` decides. Else the library is asked: `MPIX_Query_cuda_support` (Open MPI and what descends
    from it), `MPIX_GPU_query_support` (MPICH 4); else the environment.
    """
    decided = os.environ.get("DTHPC_MPI_CUDA")
    if decided is not None:
        return decided == "1"
    library = ctypes.CDLL(str(mpi.__file__))  # which finds what it is linked to as well
    if _has(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if _has(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        cuda = 0  # MPIX_GPU_SUPPORT_CUDA
        return library.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer.value)
    return any(os.environ.get(name) == value for name, value in _SWITCHES.items())


def _has(library: ctypes.CDLL, name: str) -> bool:
    try:
        getattr(library, name)
    except AttributeError:
        return False
    return True
