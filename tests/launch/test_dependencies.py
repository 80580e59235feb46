"""Waiting for other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.launch.dependencies import dependency_text, unknown_jobs
from dthpc.monitor.events import EventLog
from dthpc.rundir import RunDir, write_json
from tests.launch.sites import add_command, client_of, make_config


def make_run(root: Path, name: str, job_id: str | None = "41", decision: str | None = None, **plan: Any) -> RunDir:
    """A run that was submitted, and whose attempt ended with a decision."""
    run = RunDir(root / name)
    write_json(run.launch, {"kind": "slurm", "requeue": "requeue", **plan})
    log = EventLog(run.events)
    log.write("run_submitted", job_id=job_id, launcher="slurm")
    log.close()
    if decision is not None:
        write_json(run.attempt(0).start, {"attempt": 0, "job_id": job_id, "nodes": ["n1"], "time": 1.0})
        end = {"attempt": 0, "cause": "finished", "decision": decision, "reason": "it says so", "time": 2.0}
        write_json(run.attempt(0).end, end)
    return run


def test_nothing_to_wait_for() -> None:
    assert dependency_text(make_config()) is None
    assert dependency_text(make_config(dependency="singleton")) == "singleton"


def test_runs_by_name_and_folder_and_jobs_by_id(tmp_path: Path) -> None:
    make_run(tmp_path, "first", "41")
    other = make_run(tmp_path / "elsewhere", "second", "42_3")
    config = make_config(tmp_path, after=["first", str(other.path), "77", "first"], dependency="singleton")
    assert dependency_text(config) == "afterok:41:42_3:77,singleton"


def test_a_run_that_has_finished_is_not_waited_for(tmp_path: Path) -> None:
    make_run(tmp_path, "done", decision="finish")
    assert dependency_text(make_config(tmp_path, after=["done"])) is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"decision": "stop"}, "ended without finishing"),
        ({"kind": "local"}, "has no Slurm job"),
        ({"requeue": "resubmit"}, "a new job after each attempt"),
    ],
)
def test_runs_that_cannot_be_waited_for(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    make_run(tmp_path, "first", **settings)
    with pytest.raises(UserError, match=told) as caught:
        dependency_text(make_config(tmp_path, after=["first"]))
    assert (caught.value.key, caught.value.value) == ("cluster.after", "first")


def test_an_unknown_name_and_a_mixture_that_slurm_has_no_words_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run of this name"):
        dependency_text(make_config(tmp_path, after=["nobody"]))
    with pytest.raises(UserError, match="joins its conditions with"):
        dependency_text(make_config(tmp_path, after=["5"], dependency="afterany:1?afterok:2"))


def test_a_job_that_slurm_does_not_know(tmp_path: Path) -> None:
    add_command(tmp_path, "squeue", 'echo "5|RUNNING|None|p|me|0:05|1:00|N/A|1|n1"')
    add_command(tmp_path, "sacct", "exit 0")
    (error,) = unknown_jobs(make_config(after=["5", "6", "a-run"]), client_of(tmp_path))
    assert (error.key, error.value) == ("cluster.after", "6")
