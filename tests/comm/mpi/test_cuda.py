from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.ranks import repository

ASK = "from mpi4py import MPI; from dthpc.comm.mpi.cuda import aware; print(aware(MPI), MPI.__file__)"


def test_the_library_is_asked_and_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", ASK], cwd=repository(), capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    answer, module = ask()
    assert answer == "False"
    assert ctypes.CDLL(module).MPIX_Query_cuda_support() == 0, "it is the library that says so"
    # A library that answers is believed, whatever is set for those that can't be asked.
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert ask()[0] == "False"
    monkeypatch.setenv("DTHPC_MPI_CUDA", "1")
    assert ask()[0] == "True"
