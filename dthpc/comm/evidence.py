"""The facts of the backend's choice, as this rank finds them: who started it, what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dthpc.comm.backend import Facts
from dthpc.comm.mpi_library import MpiLibrary, find_library
from dthpc.errors import UserError

_PMIX = ("PMIX_NAMESPACE", "PMIX_RANK")
_PMI = ("PMI_", "PMI2_")
_UNSTARTED = "no MPI launcher started this process, so that every rank would think that it is rank 0 of 1"


def find_facts(
    device: str, world_size: int, nodes: int, env: Mapping[str, str] = os.environ, python: str = sys.executable
) -> Facts:
    """What this rank knows before it has met the others; neither MPI nor mpi4py is loaded.

    Args:
        device: `cpu` or `cuda`.
        world_size: number of ranks.
        nodes: number of nodes.
        env: the rank's environment.
        python: the interpreter, whose mpi4py counts.
    """
    wiring, launcher = who_started(env)
    library, why = (None, _UNSTARTED) if wiring is None else _library(python, env)
    if why is None:
        why = _unfit(library, wiring, launcher)
    return Facts(
        device,
        nccl=device == "cuda" and _has_nccl(),
        world_size=world_size,
        nodes=nodes,
        launcher=launcher,
        no_mpi=why,
        mpi_library="a library that only loading it can name" if library is None else library.wheel or library.name,
    )


def who_started(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """How an MPI launcher wired this process up (`pmix` or `pmi`), and its name in words; `None` twice: none did."""
    by_slurm = "SLURM_STEP_ID" in env
    if any(name in env for name in _PMIX):
        own = "OMPI_COMM_WORLD_SIZE" in env and not by_slurm
        return "pmix", "srun --mpi=pmix" if by_slurm else "Open MPI's mpiexec" if own else "a launcher with PMIx"
    if any(name.startswith(_PMI) for name in env):
        return "pmi", "srun with PMI" if by_slurm else "mpiexec"
    return None, None


def _library(python: str, env: Mapping[str, str]) -> tuple[MpiLibrary | None, str | None]:
    try:
        return find_library(Path(python), env), None
    except UserError:
        return None, "mpi4py is not installed"


def _unfit(library: MpiLibrary | None, wiring: str | None, launcher: str | None) -> str | None:
    """Why a library can't be started by what started this process."""
    if library is None:
        return None
    if library.is_openmpi and wiring == "pmi":
        return f"{library.name} is wired up by PMIx, and {launcher} offers PMI, so that each rank would be 0 of 1"
    if library.wheel and not library.is_openmpi and wiring == "pmix":
        return f"{library.name} is wired up by PMI, and {launcher} offers PMIx, so that each rank would be 0 of 1"
    return None


def _has_nccl() -> bool:
    import torch.distributed

    return torch.distributed.is_nccl_available()
