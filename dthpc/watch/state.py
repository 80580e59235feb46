"""From evidence to one word: what state a run is in, and why. Pure, so that every case can be told and tested."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dthpc.slurm.records import JobRecord
from dthpc.watch.report import AttemptReport

RESTARTS = ("requeue", "resubmit", "restart")
"""Decisions of the keeper after which another attempt comes."""

_OUTSIDE_CAUSES = ("preempted", "time_limit", "requeued")

_HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
_WORKING = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED", "UPDATE_DB")


class Keeper(Enum):
    """Whether the process that keeps the newest attempt lives."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It is, or was, on another machine, which can't be looked at from here."""


@dataclass(frozen=True)
class Evidence:
    """All that the state follows from."""

    kind: str | None
    """`local`, `slurm` or `allocation`."""

    last: AttemptReport | None
    """The newest attempt."""

    awaits_start: bool = False
    """Whether no attempt has begun since the newest submission."""

    already_finished: bool = False
    """Whether the submitted configuration had already been trained to its end, so that there was nothing to do."""

    stop_signal: str | None = None
    """Signal that the current attempt has been asked to stop by."""

    trains: bool = True
    """Whether the current attempt has made a step, so that there is something to save."""

    trained: bool = False
    """Whether the events say that the training has reached its end."""

    not_started: str | None = None
    """Why the keeper of a sweep did not begin the run, where it says so."""

    last_words: str | None = None
    """What a local keeper printed last, if it ended before its first record."""

    keeper: Keeper = Keeper.UNKNOWN
    """Of a local run."""

    job_id: str | None = None
    """Slurm job that should run, or have run, the newest attempt."""

    job: JobRecord | None = None
    """What Slurm says of that job."""

    slurm_answered: bool = False
    """Whether Slurm was asked and answered, so that a job without a record is one that Slurm doesn't know."""

    slurm_trouble: str | None = None
    """Why it did not answer, in one line."""


@dataclass(frozen=True)
class Verdict:
    """What the evidence says."""

    state: str
    """One of `dthpc.watch.report.STATES`."""

    why: str | None = None
    """One line."""

    conflict: str | None = None
    """One line where Slurm and the records disagree."""


def judge(evidence: Evidence) -> Verdict:
    """The state of a run."""
    if evidence.kind == "slurm" or (evidence.job is not None and evidence.kind != "allocation"):
        return _judge_slurm(evidence)
    return _judge_local(evidence)


def recorded_end(last: AttemptReport | None, awaits_start: bool) -> Verdict | None:
    """The end that the run itself recorded, if its newest attempt was its last and it was not submitted again since."""
    if last is None or awaits_start or last.decision is None or last.decision in RESTARTS:
        return None
    if last.decision == "finish":
        return Verdict("finished", last.reason)
    if last.cause == "cancelled":
        return Verdict("cancelled", last.reason or "cancelled")
    # Ended from outside with its state saved, but not allowed to go on by itself: nothing is wrong with the run.
    if last.cause == "stopped" or (last.cause in _OUTSIDE_CAUSES and last.progressed):
        return Verdict("stopped", last.reason or f"stopped: {last.cause}")
    return Verdict("failed", last.reason or last.cause or "the keeper gave no reason")


def _end(evidence: Evidence) -> Verdict | None:
    if evidence.awaits_start and evidence.already_finished:
        return Verdict("finished", "it was finished before it was submitted again; nothing was left to do")
    if evidence.not_started is not None and (evidence.awaits_start or evidence.last is None):
        return Verdict("stopped", f"not started; {evidence.not_started}")
    return recorded_end(evidence.last, evidence.awaits_start)


def _waits_for_restart(evidence: Evidence) -> bool:
    last = evidence.last
    return last is not None and not evidence.awaits_start and last.decision in RESTARTS


def _judge_local(evidence: Evidence) -> Verdict:
    if evidence.keeper is Keeper.ALIVE and evidence.not_started is None:
        # Its end is not told before the keeper has let go of the run: until then it may still write.
        if _waits_for_restart(evidence):
            assert evidence.last is not None
            return Verdict("requeued", evidence.last.reason)
        if evidence.last is None or evidence.awaits_start:
            return Verdict("pending", "its keeper has not come to it yet")
        return _at_work(evidence)
    end = _end(evidence)
    if end is not None:
        return end
    if evidence.keeper is Keeper.UNKNOWN and evidence.last is not None and evidence.last.ended is None:
        return Verdict("running", None, "it runs on another machine, so whether its process still lives is not known")
    if evidence.last is None or evidence.awaits_start:
        if evidence.last_words is not None:
            return Verdict("lost", f"its keeper ended before its first record: {evidence.last_words}")
        return Verdict("lost", "it was submitted, but its keeper never started or died before its first record")
    if _waits_for_restart(evidence):
        return Verdict("lost", f"it was to start again, but its keeper is gone ({evidence.last.reason or 'no reason'})")
    return Verdict(
        "lost", "its keeper and ranks are gone without a record of the end", "its records say that it is running"
    )


def _at_work(evidence: Evidence) -> Verdict:
    if evidence.stop_signal is not None and not evidence.trains:
        return Verdict("running", f"asked to stop by {evidence.stop_signal} before its first step")
    if evidence.stop_signal is not None:
        return Verdict("saving", f"asked to stop by {evidence.stop_signal}")
    if evidence.trained:
        return Verdict("running", "the training is done, the attempt is closing")
    return Verdict("running")


def _judge_slurm(evidence: Evidence) -> Verdict:
    job = evidence.job
    if job is None:
        return _judge_without_job(evidence)
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED"):
        return _judge_queued(evidence, job)
    if job.state == "SUSPENDED":
        return Verdict("held", "suspended by Slurm")
    end = _end(evidence)
    if job.state in _WORKING:
        if job.state != "RUNNING" and end is not None:
            return end
        if end is not None:
            return Verdict("running", f"its records say {end.state}, and the job is closing")
        if job.state == "COMPLETING" and _waits_for_restart(evidence):
            return Verdict("requeued", evidence.last.reason if evidence.last else None)
        return _at_work(evidence)
    return _judge_ended_job(evidence, job, end)


def _judge_queued(evidence: Evidence, job: JobRecord) -> Verdict:
    reason = job.reason or "no reason given"
    end = recorded_end(evidence.last, evidence.awaits_start)
    conflict = f"Slurm will start it again, but its records say {end.state}" if end is not None else None
    if reason in _HELD or reason.startswith("launch_failed") or job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
        return Verdict(
            "held", f"held in the queue ({reason}); release it with: scontrol release {job.job_id}", conflict
        )
    if reason == "DependencyNeverSatisfied":
        return Verdict("held", "it waits for a run that has failed (DependencyNeverSatisfied); cancel it with scancel")
    if evidence.last is not None and (not evidence.awaits_start or evidence.last.decision == "resubmit"):
        ended = (
            f"; attempt {evidence.last.number} ended: {evidence.last.reason or evidence.last.cause or 'not recorded'}"
        )
        return Verdict("requeued", f"waits in the queue ({reason}){ended}", conflict)
    return Verdict("pending", f"waits in the queue ({reason})")


def _judge_ended_job(evidence: Evidence, job: JobRecord, end: Verdict | None) -> Verdict:
    said = f"Slurm says {job.state}"
    if end is not None:
        agree = (job.state == "COMPLETED") or end.state != "finished"
        return Verdict(end.state, end.why, None if agree else f"{said}, its records say {end.state}")
    if job.state == "CANCELLED":
        return Verdict("cancelled", "cancelled (scancel) before it could record its end")
    if _waits_for_restart(evidence):
        assert evidence.last is not None
        return Verdict(
            "lost", f"it was to start again ({evidence.last.reason}), but {said}", f"{said}, its records wait"
        )
    if job.state == "COMPLETED":
        return Verdict("lost", "the job ended without a record of how the run did", f"{said}, its records say running")
    reason = f" ({job.reason})" if job.reason else ""
    return Verdict("failed", f"{_JOB_ENDS.get(job.state, said)}{reason}")


_JOB_ENDS = {
    "TIMEOUT": "killed at the time limit before it could save",
    "NODE_FAIL": "a node of the job failed and Slurm did not requeue it",
    "OUT_OF_MEMORY": "killed for using more memory than the job has",
    "PREEMPTED": "preempted and not requeued by Slurm",
    "DEADLINE": "killed at its deadline",
    "BOOT_FAIL": "its nodes did not boot",
    "FAILED": "the job failed before it could record its end",
}


def _judge_without_job(evidence: Evidence) -> Verdict:
    end = _end(evidence)
    if end is not None:
        return end
    if not evidence.slurm_answered:
        trouble = evidence.slurm_trouble or "Slurm was not asked"
        if _waits_for_restart(evidence):
            return Verdict(
                "requeued", evidence.last.reason if evidence.last else None, f"by its records alone: {trouble}"
            )
        if evidence.last is None or evidence.awaits_start:
            return Verdict("pending", None, f"by its records alone: {trouble}")
        verdict = _at_work(evidence)
        return Verdict(verdict.state, verdict.why, f"by its records alone: {trouble}")
    job = f"Slurm does not know job {evidence.job_id}" if evidence.job_id else "no Slurm job is recorded for it"
    if evidence.last is None or evidence.awaits_start:
        return Verdict("lost", f"it never started, and {job}")
    if _waits_for_restart(evidence):
        return Verdict("lost", f"it was to start again ({evidence.last.reason}), but {job}", f"{job}, its records wait")
    return Verdict("lost", f"{job}, and nothing recorded the end", f"{job}, its records say running")
