from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.comm.mpi_library import MpiLibrary, belongs, find_launcher, find_library, find_mpi4py
from dthpc.errors import UserError
from tests.mpi_installations import FAMILIES, python_of


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_that_mpi4py_loads_is_found_without_loading_it(family: str) -> None:
    python = python_of(family)
    found = find_library(python, {})
    assert found is not None
    assert (found.family, found.is_openmpi) == (family, family == "Open MPI")
    assert found.wheel is not None
    # What mpi4py itself says, in a process of its own; without MPI_Init, which wants a launcher.
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
        "print(next(line.split()[-1] for line in open('/proc/self/maps') if '/libmpi.so' in line))"
    )
    loaded = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found.path.resolve() == Path(loaded).resolve()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_launcher_is_the_librarys_own(family: str) -> None:
    python = python_of(family)
    library = find_library(python, {})
    assert library is not None
    assert find_launcher(library, python, {}) == python.parent / "mpiexec"
    elsewhere = MpiLibrary(library.family, Path("/nowhere/lib/libmpi.so"))
    assert find_launcher(elsewhere, Path("/nowhere/bin/python"), {"PATH": str(python.parent)}).parent == python.parent


def test_a_launcher_of_another_mpi_is_refused() -> None:
    mpich, openmpi = (find_library(python_of(family), {}) for family in FAMILIES)
    assert mpich is not None
    assert openmpi is not None
    others = python_of("Open MPI").parent
    assert (belongs(others / "mpiexec", mpich), belongs(others / "mpiexec", openmpi)) == (False, True)
    moved = MpiLibrary("MPICH", Path("/nowhere/lib/libmpi.so.12"))
    with pytest.raises(UserError, match=f"mpiexec at {others / 'mpiexec'} belongs to another MPI"):
        find_launcher(moved, Path("/nowhere/bin/python"), {"PATH": str(others)})
    with pytest.raises(UserError, match="there is no mpiexec"):
        find_launcher(moved, Path("/nowhere/bin/python"), {"PATH": "/nowhere"})


def test_what_is_named_by_mpi4pys_own_variable_wins(tmp_path: Path) -> None:
    library = find_library(python_of("MPICH"), {})
    assert library is not None
    other = tmp_path / "libmpi.so.12"
    other.symlink_to(library.path.resolve())
    for named in (other, tmp_path):
        found = find_library(Path(sys.executable), {"MPI4PY_LIBMPI": str(named)})
        assert found == MpiLibrary("MPICH", other)
    (tmp_path / "libmpi.so").write_text("INPUT(libmpi.so.12)\n")  # a linker's script, which cannot be loaded
    found = find_library(Path(sys.executable), {"MPI4PY_LIBMPI": str(tmp_path)})
    assert found == MpiLibrary("MPICH", other)
    assert find_library(Path(sys.executable), {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}) is None


def test_an_interpreter_without_mpi4py_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no mpi4py.*pip install 'dthpc\[mpi\]'"):
        find_mpi4py(tmp_path / "bin" / "python")
