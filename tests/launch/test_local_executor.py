from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import submitit

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.launch.local_executor import LocalExecutor
from dthpc.rundir import RunDir
from tests.attempt.runs import REPOSITORY, end_of, make_run, wait_for, wait_ready


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def launch(*runs: RunDir) -> list[submitit.Job[None]]:
    return LocalExecutor(runs[0].submissions).launch([(run, LaunchPlan.read(run)) for run in runs])


def test_a_run_is_started_in_a_session_of_its_own_and_told_by_submitits_job(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["save", "save"]])
    assert isinstance(LocalExecutor(run.submissions), submitit.LocalExecutor)
    (job,) = launch(run)
    wait_ready(run, 0, 2)
    keeper = int(job.job_id)
    assert os.getsid(keeper) == keeper != os.getsid(0)
    assert (job.state, job.done()) == ("RUNNING", False)
    job.cancel()
    wait_for(job.done)
    assert end_of(run, 0)["cause"] == "stopped"
    assert "asked to save and stop" in (run.submissions / "keeper.log").read_text()


def test_the_runs_of_a_sweep_come_one_after_another(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [["save"]]) for name in "ab"]
    first, second = launch(*runs)
    assert first.job_id == second.job_id
    wait_ready(runs[0], 0, 1)
    assert not runs[1].attempts.exists()
    os.kill(int(first.job_id), signal.SIGTERM)
    wait_for(second.done)
    assert end_of(runs[0], 0)["cause"] == "stopped"
    assert not runs[1].attempts.exists()


def test_nothing_is_started_when_one_of_the_runs_is_already_running(tmp_path: Path) -> None:
    busy, free = (make_run(tmp_path / name, [["save"]]) for name in ("busy", "free"))
    (job,) = launch(busy)
    wait_ready(busy, 0, 1)
    with pytest.raises(UserError, match="run=busy: the run is already running"):
        launch(free, busy)
    assert not free.attempts.exists()
    job.cancel()
    wait_for(job.done)
