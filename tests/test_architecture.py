"""The picture in the README, held against the code: imports go down it, and the doors load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dthpc"
# Top to bottom; rooms on one line are siblings, which do not import each other.
PICTURE = [
    ["__main__"],
    ["cli"],
    ["submit", "status", "doctor"],
    ["launch"],
    ["watch"],
    ["attempt"],
    ["jobs"],
    ["train"],
    ["checkpoint", "parallel"],
    ["models", "data"],
    ["comm"],
    ["context"],
    ["resilience"],
    ["placement"],
    ["slurm"],
    ["config"],
    ["monitor"],
    ["rundir"],
    ["options"],
    ["errors"],
    ["__init__"],
]
LEVEL = {room: level for level, rooms in enumerate(PICTURE) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, str]]:
    """Rooms that a file imports from, each with the whole name of the module and of what is taken from it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dthpc":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "dthpc"]
    rooms = [[*name.split("."), ""][1] for name in found]
    return [(room if room in LEVEL else "__init__", name) for room, name in zip(rooms, found, strict=True)]


def test_every_room_is_in_the_picture() -> None:
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} == set(LEVEL)


def test_imports_go_down_the_picture() -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for room, name in imports_of(path)
        if room != room_of(path) and LEVEL[room] <= LEVEL[room_of(path)]
    ]
    assert upwards == []


def test_no_room_takes_a_private_name_of_another() -> None:
    private = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for room, name in imports_of(path)
        if room != room_of(path) and any(part.startswith("_") and part != "__version__" for part in name.split("."))
    ]
    assert private == []


@pytest.mark.parametrize("door", ["submit", "status", "cli", "attempt.keeper", "launch.submission"])
def test_what_runs_on_a_login_node_loads_nothing_heavy(door: str) -> None:
    heavy = "{'torch', 'numpy', 'mpi4py', 'tensorboardX'}"
    code = f"import sys, dthpc.{door}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
