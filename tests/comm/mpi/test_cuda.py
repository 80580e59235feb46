from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import repository

ASK = """
import ctypes
from mpi4py import MPI
from dthpc.comm.mpi.cuda import aware
print(aware(MPI), ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
"""


def test_the_library_is_asked_and_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", ASK], cwd=repository(), capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    answer, library = ask()
    assert answer == str(library == "1")
    # A library that answers is believed, whatever is set for those that can't be asked.
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert ask() == [answer, library]
    monkeypatch.setenv("DTHPC_MPI_CUDA", str(1 - int(library)))
    assert ask() == [str(library == "0"), library]
