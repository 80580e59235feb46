from __future__ import annotations

from typing import Any

import pytest

from dthpc.slurm.records import JobRecord
from dthpc.watch.report import STATES, AttemptReport
from dthpc.watch.state import Evidence, Keeper, Verdict, judge


def attempt(**fields: Any) -> AttemptReport:
    return AttemptReport(number=0, started=100.0, **fields)


def ended(decision: str, cause: str = "crash", reason: str = "the reason", **more: Any) -> AttemptReport:
    return attempt(ended=200.0, decision=decision, cause=cause, reason=reason, **more)


def slurm(state: str | None, last: AttemptReport | None = None, reason: str | None = None, **fields: Any) -> Verdict:
    job = None if state is None else JobRecord("7", state, "squeue", reason=reason)
    return judge(Evidence("slurm", last, job_id="7", job=job, slurm_answered=True, **fields))


def local(keeper: Keeper, last: AttemptReport | None = None, **fields: Any) -> Verdict:
    return judge(Evidence("local", last, keeper=keeper, **fields))


LOCAL_CASES = [
    (Keeper.ALIVE, None, {}, "pending"),
    (Keeper.ALIVE, attempt(), {}, "running"),
    (Keeper.ALIVE, attempt(), {"stop_signal": "SIGINT"}, "saving"),
    (Keeper.ALIVE, attempt(), {"stop_signal": "SIGINT", "trains": False}, "running"),
    (Keeper.ALIVE, ended("requeue"), {}, "requeued"),
    (Keeper.ALIVE, ended("stop"), {"awaits_start": True}, "pending"),
    (Keeper.GONE, None, {}, "lost"),
    (Keeper.GONE, attempt(), {}, "lost"),
    (Keeper.GONE, ended("requeue"), {}, "lost"),
    (Keeper.GONE, ended("finish", "finished"), {}, "finished"),
    (Keeper.GONE, ended("stop", "crash"), {}, "failed"),
    (Keeper.GONE, ended("stop", "stopped"), {}, "stopped"),
    (Keeper.GONE, ended("stop", "stopped"), {"awaits_start": True}, "lost"),
    (Keeper.GONE, ended("stop", "preempted", progressed=True), {}, "stopped"),
    (Keeper.GONE, ended("stop", "preempted"), {}, "failed"),
    (Keeper.UNKNOWN, attempt(), {}, "running"),
    (Keeper.UNKNOWN, ended("stop"), {}, "failed"),
]


@pytest.mark.parametrize(("keeper", "last", "more", "state"), LOCAL_CASES)
def test_local_states(keeper: Keeper, last: AttemptReport | None, more: dict[str, Any], state: str) -> None:
    assert local(keeper, last, **more).state == state


SLURM_CASES = [
    ("PENDING", None, "Priority", "pending"),
    ("PENDING", None, "JobHeldUser", "held"),
    ("PENDING", None, "DependencyNeverSatisfied", "held"),
    ("PENDING", ended("requeue", "preempted"), "BeginTime", "requeued"),
    ("PENDING", attempt(), "BeginTime", "requeued"),
    ("REQUEUE_HOLD", ended("requeue"), None, "held"),
    ("RUNNING", attempt(), None, "running"),
    ("RUNNING", ended("requeue"), None, "running"),
    ("RUNNING", ended("finish", "finished"), None, "running"),
    ("CONFIGURING", None, None, "running"),
    ("SUSPENDED", attempt(), None, "held"),
    ("COMPLETING", ended("requeue"), None, "requeued"),
    ("COMPLETING", ended("finish", "finished"), None, "finished"),
    ("COMPLETED", ended("finish", "finished"), None, "finished"),
    ("COMPLETED", attempt(), None, "lost"),
    ("COMPLETED", ended("requeue"), None, "lost"),
    ("FAILED", ended("stop"), None, "failed"),
    ("FAILED", attempt(), None, "failed"),
    ("TIMEOUT", attempt(), None, "failed"),
    ("NODE_FAIL", attempt(), None, "failed"),
    ("CANCELLED", attempt(), None, "cancelled"),
    ("CANCELLED", None, None, "cancelled"),
    ("CANCELLED", ended("stop", "cancelled"), None, "cancelled"),
    (None, None, None, "lost"),
    (None, attempt(), None, "lost"),
    (None, ended("requeue"), None, "lost"),
    (None, ended("finish", "finished"), None, "finished"),
]


@pytest.mark.parametrize(("job", "last", "reason", "state"), SLURM_CASES)
def test_slurm_states(job: str | None, last: AttemptReport | None, reason: str | None, state: str) -> None:
    verdict = slurm(job, last, reason)
    assert verdict.state == state
    assert verdict.state == "running" or verdict.why


def test_every_state_is_told_by_some_case() -> None:
    told = {case[-1] for case in (*LOCAL_CASES, *SLURM_CASES)}
    assert told == set(STATES)


def test_a_job_that_slurm_does_not_know_contradicts_records_that_say_running() -> None:
    verdict = slurm(None, attempt())
    assert verdict.why == "Slurm does not know job 7, and nothing recorded the end"
    assert verdict.conflict is not None
    assert "records say running" in verdict.conflict


def test_a_dead_local_process_contradicts_its_records() -> None:
    assert local(Keeper.GONE, attempt()).conflict == "its records say that it is running"


def test_a_failed_job_whose_records_say_finished_is_finished_and_says_so() -> None:
    verdict = slurm("FAILED", ended("finish", "finished"))
    assert verdict.state == "finished"
    assert verdict.conflict == "Slurm says FAILED, its records say finished"


def test_a_finished_run_that_slurm_starts_again_is_a_disagreement() -> None:
    assert slurm("PENDING", ended("finish", "finished")).conflict is not None


def test_without_slurm_the_records_are_believed_and_that_is_said() -> None:
    verdict = judge(Evidence("slurm", attempt(), job_id="7", slurm_trouble="squeue is not installed"))
    assert verdict == Verdict("running", None, "by its records alone: squeue is not installed")


def test_an_ended_run_needs_no_slurm() -> None:
    assert judge(Evidence("slurm", ended("finish", "finished"), job_id="7")).conflict is None


def test_the_keepers_reason_is_why_a_run_failed() -> None:
    assert slurm("FAILED", ended("stop", reason="3 attempts without progress")).why == "3 attempts without progress"
