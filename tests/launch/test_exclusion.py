"""`cluster.exclude`, by names and by what a preflight has found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dthpc.errors import UserError
from dthpc.launch.exclusion import excluded_nodes


def excluded(root: Path, value: str | None) -> list[str]:
    return excluded_nodes(SimpleNamespace(cluster=SimpleNamespace(exclude=value), run=SimpleNamespace(root=str(root))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for age, (name, bad) in enumerate([("clean", []), ("second", ["n7"]), ("first", ["n2", "n3"])]):
        path = tmp_path / name / "preflight.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"bad": bad}))
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "training").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        ("n[1-3],m", ["n1", "n2", "n3", "m"]),
        ("preflight:first", ["n2", "n3"]),
        ("preflight:clean", []),
        ("preflight:last", []),
        ("n[1-2],preflight:first,x", ["n1", "n2", "x", "n3"]),
        ("preflight:first,preflight:second", ["n2", "n3", "n7"]),
    ],
)
def test_names_and_preflights_mix(root: Path, value: str | None, names: list[str]) -> None:
    assert excluded(root, value) == names


def test_a_run_may_be_named_by_its_folder(root: Path) -> None:
    assert excluded(root / "elsewhere", f"preflight:{root / 'second'}") == ["n7"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("n[1-", r"cluster\.exclude=n\[1-: a bracket that is never closed"),
        (" ", r"cluster\.exclude=' ': names no host"),
        ("preflight:frist", r"there is no such preflight under .*did you mean first"),
        ("preflight:training", r"holds no preflight\.json: it is no preflight, or has not ended"),
    ],
)
def test_what_can_not_be_resolved_is_told(root: Path, value: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        excluded(root, value)


def test_where_there_is_no_preflight_at_all_one_is_proposed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run one: python -m dthpc\.submit \+cluster=slurm job=preflight"):
        excluded(tmp_path, "preflight:last")
