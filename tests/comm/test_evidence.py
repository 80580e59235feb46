"""Who started a rank, and whether its MPI can be wired up by that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dthpc.comm.evidence import find_facts, who_started


@pytest.mark.parametrize(
    ("env", "wiring", "name"),
    [
        ({}, None, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, None, None),
        ({"PMI_RANK": "1", "PMI_FD": "7"}, "pmi", "mpiexec"),
        ({"PMI_RANK": "1", "SLURM_STEP_ID": "0"}, "pmi", "srun with PMI"),
        ({"PMIX_RANK": "0", "SLURM_STEP_ID": "0"}, "pmix", "srun --mpi=pmix"),
        ({"PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "pmix", "Open MPI's mpiexec"),
    ],
)
def test_the_launcher_is_known_by_what_it_leaves(env: dict[str, str], wiring: str | None, name: str | None) -> None:
    assert who_started(env) == (wiring, name)


def test_without_a_launcher_mpi_is_refused_before_it_is_looked_for() -> None:
    facts = find_facts("cpu", 2, 1, {})
    assert facts.no_mpi is not None
    assert "rank 0 of 1" in facts.no_mpi
    assert facts.launcher is None


def test_a_library_that_the_launcher_cannot_wire_up_is_told(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "python3" / "site-packages" / "mpi4py"
    package.mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    library = tmp_path / "lib" / "libmpi.so"
    library.write_bytes(b"\x7fELF" + b"\0" * 64 + b"ompi_mpi_comm_self\0" + b"\0" * 64)
    env = {"PMI_RANK": "0", "MPI4PY_LIBMPI": str(library)}
    facts = find_facts("cpu", 2, 1, env, str(python))
    assert facts.no_mpi is not None
    assert "is wired up by PMIx, and mpiexec offers PMI" in facts.no_mpi
    assert find_facts("cpu", 2, 1, {**env, "PMIX_RANK": "0"}, str(python)).no_mpi is None
    bare = find_facts("cpu", 2, 1, {"PMI_RANK": "0"}, str(tmp_path / "other" / "bin" / "python"))
    assert bare.no_mpi == "mpi4py is not installed"


def test_on_this_interpreter_nothing_is_loaded() -> None:
    find_facts("cpu", 2, 1, {"PMI_RANK": "0"}, sys.executable)
    assert "mpi4py.MPI" not in sys.modules
