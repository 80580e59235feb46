"""The decision table. What Slurm shows in each case was read off a real Slurm 22.05 (see the module's text)."""

from __future__ import annotations

from typing import Any

import pytest

from dthpc.resilience.attempts import Attempt
from dthpc.resilience.decide import Limits, SchedulerState, causes_in_log, decide, decide_at_start
from dthpc.resilience.outcome import Outcome, RankRecord

RUNNING = SchedulerState(running=True, seconds_left=3000.0)
COMPLETING = SchedulerState(running=False, seconds_left=-1.0)
REQUEUED = SchedulerState(running=False, requeued=True)
REQUEUE = Limits("requeue", save_lead_s=30)
LOCAL = Limits("restart")


def record(rank: int, cause: str, **fields: Any) -> RankRecord:
    return RankRecord(rank, cause, **{"time": float(rank), "host": f"n{rank}", **fields})


def saved(signal: str = "SIGTERM", step: int = 40) -> dict[int, RankRecord]:
    return {rank: record(rank, "preempted", signal=signal, step=step) for rank in range(2)}


def crashed(**fields: Any) -> dict[int, RankRecord]:
    late = record(0, "crash", time=9.0, error="RuntimeError: connection closed by peer")
    return {0: late, 1: record(1, "crash", time=5.0, error="ValueError: hole in the data", step=12, **fields)}


def finished() -> dict[int, RankRecord]:
    return {rank: record(rank, "finished") for rank in range(2)}


def test_a_term_to_the_batch_shell_alone_is_a_stop() -> None:
    # The keeper asks the ranks by USR2, so their own signals do not tell.
    decision = decide(outcome(saved("SIGUSR2"), signals=("SIGTERM",)), [], True, REQUEUE, RUNNING)
    assert (decision.cause, decision.action) == ("stopped", "stop")


def outcome(records: dict[int, RankRecord], **fields: Any) -> Outcome:
    return Outcome(2, records, fields.pop("exit_codes", {"srun": 75}), **fields)


def ended(number: int, progressed: bool, cause: str = "crash", decision: str = "restart", **end: Any) -> Attempt:
    return Attempt(number, {}, {"cause": cause, "decision": decision, "reason": f"why {number}", **end}, progressed)


CASES = {
    "preempted, GraceTime=20": (saved(), ("cancelled",), SchedulerState(True, preempted=True), "preempted", "requeue"),
    "preempted, GraceTime=0": (saved(), ("preempted",), REQUEUED, "preempted", "requeue"),
    "preempted, mode CANCEL": (
        saved(),
        ("preempted",),
        SchedulerState(False, preempted=True),
        "preempted",
        "requeue",
    ),
    "preempted, mode CANCEL, logs unread": (saved(), (), SchedulerState(False, preempted=True), "preempted", "requeue"),
    "preempted while it could not save": ({}, ("preempted",), REQUEUED, "preempted", "requeue"),
    "preempted and failed while saving": (crashed(), (), SchedulerState(True, preempted=True), "preempted", "requeue"),
    "scontrol requeue": (saved(), ("requeued",), REQUEUED, "requeued", "requeue"),
    "requeued, logs unread": (saved(), (), REQUEUED, "requeued", "requeue"),
    "peer node gone": ({}, ("node_failure",), REQUEUED, "node_failure", "requeue"),
    "node gone, job not requeued": ({}, ("node_failure",), RUNNING, "node_failure", "requeue"),
    "time limit": (saved(), ("time_limit",), SchedulerState(False, timed_out=True), "time_limit", "requeue"),
    "time limit, logs unread": (saved(), (), SchedulerState(False, timed_out=True), "time_limit", "requeue"),
    "early signal": (saved("SIGUSR2"), (), SchedulerState(True, seconds_left=80.0), "time_limit", "requeue"),
    "scancel -s USR2": (saved("SIGUSR2"), (), RUNNING, "preempted", "requeue"),
    "scancel -s TERM": (saved("SIGTERM"), (), RUNNING, "stopped", "stop"),
    "scancel": (saved(), ("cancelled",), COMPLETING, "cancelled", "stop"),
    "scancel while it could not save": ({}, ("cancelled",), COMPLETING, "cancelled", "stop"),
    "scancel within the grace time": (
        saved(),
        ("cancelled", "cancelled"),
        SchedulerState(False, preempted=True),
        "cancelled",
        "stop",
    ),
    "crash": (crashed(), (), RUNNING, "crash", "requeue"),
    "silent death": ({}, (), RUNNING, "crash", "requeue"),
    "one rank died silently, the other saved": ({0: saved()[0]}, (), RUNNING, "crash", "requeue"),
    "finished": (finished(), (), RUNNING, "finished", "finish"),
    "finished as it was preempted": (finished(), ("preempted",), REQUEUED, "finished", "finish"),
    "finished as it was cancelled": (finished(), ("cancelled",), COMPLETING, "finished", "finish"),
    "user error": ({0: record(0, "user_error", error="bad")}, (), RUNNING, "user_error", "stop"),
    "user error as it was preempted": (
        {0: record(0, "user_error", error="bad")},
        ("preempted",),
        REQUEUED,
        "user_error",
        "stop",
    ),
    "Slurm silent, logs speak": (saved(), ("preempted",), None, "preempted", "requeue"),
    "Slurm and logs silent": (saved(), (), None, "preempted", "requeue"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_slurm_shows_leads_to_cause_and_action(case: str) -> None:
    records, log, scheduler, cause, action = CASES[case]
    decision = decide(outcome(records, log_causes=log), [], True, REQUEUE, scheduler)
    assert (decision.cause, decision.action) == (cause, action), decision.reason
    assert decision.reason


@pytest.mark.parametrize(
    ("asked", "records", "cause", "action"),
    [
        ("preempt", saved("SIGUSR2"), "preempted", "restart"),
        ("stop", saved(), "stopped", "stop"),
        ("stop", {}, "stopped", "stop"),
        ("stop", finished(), "finished", "finish"),
        (None, crashed(), "crash", "restart"),
        (None, finished(), "finished", "finish"),
    ],
)
def test_local_runs(asked: str | None, records: dict[int, RankRecord], cause: str, action: str) -> None:
    decision = decide(outcome(records, asked=asked), [], True, LOCAL, None)
    assert (decision.cause, decision.action) == (cause, action)


def test_the_reason_names_the_first_failure_in_time_and_what_was_saved() -> None:
    decision = decide(outcome(crashed()), [], True, REQUEUE, RUNNING)
    assert decision.reason == "rank 1 on n1 failed after step 12: ValueError: hole in the data"
    decision = decide(outcome(saved(step=41)), [], True, REQUEUE, SchedulerState(True, preempted=True))
    assert "state saved at step 41" in decision.reason
    decision = decide(outcome({}, exit_codes={"rank 1": -9}), [], True, LOCAL, None)
    assert "rank 1 was killed by SIGKILL" in decision.reason
    decision = decide(outcome({}, exit_codes={"srun": -9}), [], True, REQUEUE, RUNNING)
    assert decision.reason == "srun was killed by SIGKILL (out of memory?)"
    decision = decide(outcome({}, exit_codes={"srun": 1}, last_words="no such file"), [], True, REQUEUE, RUNNING)
    assert "2 of 2 ranks ended without a word" in decision.reason
    assert "no such file" in decision.reason


def test_what_the_watchdogs_found_is_the_reason_unless_a_rank_failed_by_itself() -> None:
    echoes = {rank: record(rank, "crash", error="collective 4 …", echo=True) for rank in range(2)}
    decision = decide(outcome(echoes, verdict="collective 4: rank 1 never came"), [], True, REQUEUE, RUNNING)
    assert (decision.cause, decision.reason) == ("crash", "collective 4: rank 1 never came")
    decision = decide(outcome(crashed(), verdict="rank 0 …"), [], True, REQUEUE, RUNNING)
    assert decision.reason == "rank 1 on n1 failed after step 12: ValueError: hole in the data"


@pytest.mark.parametrize("cause", ["crash", "preempted"])
def test_attempts_without_progress_end_the_run_whatever_their_causes(cause: str) -> None:
    records, scheduler = (crashed(), RUNNING) if cause == "crash" else (saved(), REQUEUED)
    history = [ended(0, True), ended(1, False, "preempted"), ended(2, False, "crash")]
    decision = decide(outcome(records), history, False, REQUEUE, scheduler)
    assert decision.action == "stop"
    assert decision.reason.startswith("3 attempts in a row ended without a new checkpoint")
    assert decide(outcome(records), history[:2], False, REQUEUE, scheduler).action == "requeue"
    assert decide(outcome(records), history, True, REQUEUE, scheduler).action == "requeue"
    endless = Limits("requeue", max_attempts_without_progress=0)
    assert decide(outcome(records), history, False, endless, scheduler).action == "requeue"


def after(error: str | None, step: int | None = 12, cause: str = "crash", progressed: bool = False) -> list[Attempt]:
    """A history whose last attempt ended so."""
    return [ended(0, True, "preempted"), ended(1, progressed, cause, first_failure={"error": error, "step": step})]


HOLE = "ValueError: hole in the data"


def test_an_exception_that_comes_again_after_the_same_step_ends_the_run() -> None:
    for earlier_left_a_checkpoint in (False, True):
        decision = decide(
            outcome(crashed()), after(HOLE, progressed=earlier_left_a_checkpoint), False, REQUEUE, RUNNING
        )
        assert (decision.cause, decision.action) == ("crash", "stop")
        assert decision.reason == (
            f"rank 1 on n1 failed after step 12: {HOLE}; as in the attempt before, so that one more would end there too"
        )


@pytest.mark.parametrize(
    ("history", "progressed"),
    [
        ([], False),
        (after(HOLE), True),
        (after(HOLE, step=11), False),
        (after(HOLE, step=None), False),
        (after("ValueError: another hole"), False),
        (after(HOLE, cause="preempted"), False),
        ([*after(HOLE, progressed=True), ended(2, False, "preempted")], False),
        ([ended(1, False)], False),
    ],
)
def test_a_crash_that_differs_or_that_follows_progress_is_tried_again(history: list[Attempt], progressed: bool) -> None:
    assert decide(outcome(crashed()), history, progressed, REQUEUE, RUNNING).action == "requeue"


@pytest.mark.parametrize(
    ("error", "action"),
    [
        ("FloatingPointError: the loss is not finite", "stop"),
        ("KeyError: 'x at 0x7fa0'", "stop"),
        ("OSError: [Errno 5] Input/output error", "requeue"),
        ("FileNotFoundError: /scratch/data", "requeue"),
        ("torch.OutOfMemoryError: CUDA out of memory", "requeue"),
        ("RuntimeError: CUDA error: an illegal memory access", "requeue"),
        ("RuntimeError: Connection reset by peer", "requeue"),
        ("dthpc.comm.rendezvous.RendezvousError: not all came", "requeue"),
    ],
)
def test_what_another_node_might_mend_is_tried_again(error: str, action: str) -> None:
    records = {0: record(0, "crash", error=error, step=3), 1: record(1, "preempted", step=3)}
    earlier = after(error.replace("0x7fa0", "0x66"), step=3)
    assert decide(outcome(records), earlier, False, REQUEUE, RUNNING).action == action


def test_a_death_that_comes_again_is_tried_again() -> None:
    dead = outcome({0: crashed()[0]}, exit_codes={"rank 1": -9, "rank 0": 1})
    earlier = after("RuntimeError: connection closed by peer", step=None)
    assert decide(dead, earlier, False, LOCAL, None).action == "restart"


def test_the_number_of_attempts_is_limited() -> None:
    limits = Limits("requeue", max_attempts=3)
    history = [ended(number, True) for number in range(2)]
    assert decide(outcome(saved()), history[:1], True, limits, REQUEUED).action == "requeue"
    decision = decide(outcome(saved()), history, True, limits, REQUEUED)
    assert decision.action == "stop"
    assert "max_attempts=3" in decision.reason


def test_a_run_that_may_not_be_restarted_stops() -> None:
    never = Limits("never")
    assert decide(outcome(saved()), [], True, never, SchedulerState(True, preempted=True)).action == "stop"
    # What Slurm has queued again comes back whatever we wish.
    assert decide(outcome(saved()), [], True, never, REQUEUED).action == "requeue"
    careful = Limits("requeue", restart_on_failure=False)
    assert decide(outcome(crashed()), [], True, careful, RUNNING).action == "stop"
    assert decide(outcome({}, log_causes=("node_failure",)), [], True, careful, REQUEUED).action == "requeue"


def test_an_attempt_that_finds_the_run_over_does_nothing() -> None:
    decision = decide_at_start(True, [], True, REQUEUE)
    assert decision is not None
    assert (decision.cause, decision.action) == ("finished", "finish")
    assert decide_at_start(False, [], False, REQUEUE) is None
    assert decide_at_start(False, [ended(0, False)], True, REQUEUE) is None


def test_slurm_bringing_back_a_run_that_was_to_stop_does_not_start_it() -> None:
    stopped = [ended(0, False, "user_error", "stop", requeued_by_slurm=True)]
    decision = decide_at_start(False, stopped, True, REQUEUE)
    assert decision is not None
    assert (decision.cause, decision.action) == ("user_error", "stop")
    assert "why 0" in decision.reason
    # `scontrol requeue` by hand, after the job had ended, is a wish to try again.
    assert decide_at_start(False, [ended(0, False, "user_error", "stop")], True, REQUEUE) is None


def test_vanishing_at_every_start_ends_too() -> None:
    lost = [ended(number, False, "lost") for number in range(3)]
    decision = decide_at_start(False, lost, True, REQUEUE)
    assert decision is not None
    assert decision.action == "stop"
    assert decide_at_start(False, lost[:2], True, REQUEUE) is None


def test_slurms_lines_in_the_logs_name_the_cause() -> None:
    text = "\n".join(
        [
            "step 3 loss 2.0",
            "slurmstepd-n1: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-29T17:29:17 DUE TO PREEMPTION ***",
            "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-29T17:29:16 DUE TO JOB REQUEUE ***",
            "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T17:30:32 DUE TO TIME LIMIT ***",
            "slurmstepd-n1: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-11-29T17:32:04 DUE TO NODE FAILURE, SEE "
            "SLURMCTLD LOG FOR DETAILS ***",
            "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-29T17:29:16 ***",
        ]
    )
    assert causes_in_log(text) == ["preempted", "requeued", "time_limit", "node_failure", "cancelled"]
    assert causes_in_log("CANCELLED AT the last moment DUE TO PREEMPTION") == []
