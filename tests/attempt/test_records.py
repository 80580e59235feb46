from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.attempt.lock import machine_identity
from dthpc.attempt.records import close_lost_attempts, log_causes, lost
from dthpc.monitor.events import EventLog, read_events
from dthpc.resilience.attempts import Attempt, read_attempts
from dthpc.resilience.outcome import RankRecord
from dthpc.rundir import AttemptDir, RunDir, write_json

PREEMPTED = "slurmstepd-n1: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-29T17:29:17 DUE TO PREEMPTION ***\n"


@pytest.fixture
def folder(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


def vanished(**start: object) -> Attempt:
    return Attempt(0, {"world_size": 2, "machine": machine_identity(), **start}, None)


def test_ranks_that_had_all_finished_finished_the_run(folder: AttemptDir) -> None:
    for rank in range(2):
        RankRecord(rank, "finished").write(folder)
    assert lost(vanished(), folder).cause == "finished"
    assert lost(vanished(world_size=3), folder).cause == "lost"


def test_the_likely_cause_is_told(folder: AttemptDir) -> None:
    assert "killed" in lost(vanished(), folder).reason
    assert "n7 went down" in lost(vanished(machine="elsewhere", host="n7"), folder).reason
    RankRecord(1, "crash", error="OSError: no space left", host="n2").write(folder)
    assert "rank 1 on n2 failed: OSError: no space left" in lost(vanished(), folder).reason
    folder.rank_log(0).write_text("step 3\n" + PREEMPTED)
    assert lost(vanished(), folder).cause == "preempted"
    RankRecord(0, "user_error", error="bad value", time=1.0).write(folder)
    assert (lost(vanished(), folder).cause, lost(vanished(), folder).action) == ("user_error", "stop")


def test_only_the_ends_of_long_logs_are_read(folder: AttemptDir) -> None:
    folder.rank_log(0).write_text(PREEMPTED + "x" * 200_000 + "\n")
    assert log_causes(folder) == []
    folder.rank_log(1).write_bytes(b"\xff\xfe" * 50_000 + PREEMPTED.encode())
    assert log_causes(folder) == ["preempted"]


def test_every_vanished_attempt_gets_an_end_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.attempt(0).start, {"chain": "c", "checkpoints": {}})
    write_json(run.attempt(1).start, {"chain": "c", "checkpoints": {"step-00000010": 1}})
    (run.checkpoints / "step-00000020").mkdir(parents=True)
    close_lost_attempts(run, EventLog(run.events))
    close_lost_attempts(run, EventLog(run.events))
    assert [(one.cause, one.progressed) for one in read_attempts(run)] == [("lost", True), ("lost", True)]
    assert [event["attempt"] for event in read_events(run.events)[0]] == [0, 1]
