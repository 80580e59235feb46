from __future__ import annotations

import json
from pathlib import Path

from dthpc.rundir import RunDir, read_json, write_json


def test_attempts_are_listed_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.attempt_numbers() == []
    for name in ("10", "2", "0", "notes"):
        (run.attempts / name).mkdir(parents=True)
    assert run.attempt_numbers() == [0, 2, 10]
    assert run.attempt(2).number == 2


def test_a_relative_folder_stays_the_same_after_a_change_of_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/a"))
    monkeypatch.chdir("/")
    assert run.path == tmp_path / "runs" / "a"


def test_json_is_replaced_whole_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_absent_or_broken_json_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") is None
    (tmp_path / "torn.json").write_text('{"a": ')
    assert read_json(tmp_path / "torn.json") is None
