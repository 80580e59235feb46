"""Why an attempt ended and what follows from it: pure functions of what was seen.

What Slurm 22.05 shows of a job at the moment its ranks have ended (`scontrol show job`, seen on a real cluster), while
SLURM_RESTART_COUNT of the attempt was 0:

| what happened             | JobState   | Restarts | PreemptTime | other                  | line in the logs       |
|---------------------------|------------|----------|-------------|------------------------|------------------------|
| preemption, GraceTime=20  | RUNNING    | 0        | a time      | EndTime = end of grace | CANCELLED AT           |
| preemption, GraceTime=0   | COMPLETING | 1        | absent      |                        | DUE TO PREEMPTION      |
| preemption by CANCEL      | COMPLETING | 0        | a time      |                        | DUE TO PREEMPTION      |
| `scontrol requeue`        | COMPLETING | 1        | absent      |                        | DUE TO JOB REQUEUE     |
| a peer's node vanished    | COMPLETING | 1        | absent      | batch node in NodeList | DUE TO NODE FAILURE, … |
| the batch node vanished   | PENDING    | 1        | absent      | Reason=BeginTime       | none, or late          |
| time limit                | COMPLETING | 0        | None        | Reason=TimeLimit       | DUE TO TIME LIMIT      |
| early signal, limit ahead | RUNNING    | 0        | None        | EndTime is near        | none                   |
| `scancel`                 | COMPLETING | 0        | None        | EndTime is past        | CANCELLED AT           |
| `scancel -s SIG`, a crash | RUNNING    | 0        | None        |                        | none                   |

COMPLETING hides the state below it, so a cancelled job is known by what it lacks; and `scontrol requeue` of a cancelled
job works, so nobody but us keeps a cancelled run from coming back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dthpc.resilience.attempts import Attempt, attempts_without_progress
from dthpc.resilience.outcome import Outcome, is_echo, signal_name

_LOG_LINE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+[A-Z]))?[^*]* \*\*\*")
_LOG_CAUSES = {
    "PREEMPTION": "preempted",
    "TIME LIMIT": "time_limit",
    "JOB REQUEUE": "requeued",
    "NODE FAILURE": "node_failure",
}

SAID_EARLY_S = 60.0
"""Slurm may send the early signal up to this much before the time that was asked for."""


@dataclass(frozen=True)
class SchedulerState:
    """What the scheduler says of the job when its ranks have ended."""

    running: bool
    """Whether the job still counts as running, not as completing."""

    requeued: bool = False
    """Whether the scheduler has already queued it again."""

    preempted: bool = False
    """Whether it holds a time of preemption."""

    timed_out: bool = False
    """Whether it names the time limit as its reason."""

    seconds_left: float | None = None
    """Seconds to the end of its time."""


@dataclass(frozen=True)
class Limits:
    """What the run's configuration allows."""

    continue_by: str
    """How a next attempt starts: `requeue`, `resubmit`, `restart` or `never`."""

    restart_on_failure: bool = True
    """Whether a crash is followed by another attempt."""

    max_attempts_without_progress: int = 3
    """Consecutive attempts without a new checkpoint after which the run stops; 0: no limit."""

    max_attempts: int | None = None
    """Attempts in all; `None`: no limit."""

    save_lead_s: float = 0.0
    """Seconds before the time limit at which the early signal was asked for."""


@dataclass(frozen=True)
class Decision:
    """How an attempt ended, and what is to be done."""

    cause: str
    """`finished`, `preempted`, `time_limit`, `requeued`, `cancelled`, `node_failure`, `crash`, `user_error`, `stopped`
    or `lost`."""

    action: str
    """`finish`, `requeue`, `resubmit`, `restart` or `stop`."""

    reason: str
    """Both in one line, for people."""


def causes_in_log(text: str) -> list[str]:
    """Causes that Slurm's own lines in a log name, in order; `cancelled` for a line that names none."""
    return [_LOG_CAUSES.get(match[1] or "", "cancelled") for match in _LOG_LINE.finditer(text)]


def decide(
    outcome: Outcome, history: Iterable[Attempt], progressed: bool, limits: Limits, scheduler: SchedulerState | None
) -> Decision:
    """Say why an attempt ended and what to do.

    Args:
        outcome: what the keeper saw.
        history: the attempts before this one that the same command of the user led to.
        progressed: whether this attempt left a new checkpoint.
        limits: what the configuration allows.
        scheduler: what Slurm says of the job; `None` for local runs, or where it does not answer.
    """
    cause, why = find_cause(outcome, limits, scheduler)
    earlier = list(history)
    fruitless = 0 if progressed else 1 + attempts_without_progress(earlier)
    if cause == "finished":
        return Decision(cause, "finish", why)
    if cause in ("user_error", "cancelled", "stopped"):
        return Decision(cause, "stop", why)
    if cause == "crash" and not limits.restart_on_failure:
        return Decision(cause, "stop", f"{why}; resilience.restart_on_failure=false forbids a restart")
    if 0 < limits.max_attempts_without_progress <= fruitless:
        return Decision(cause, "stop", f"{_fruitless(fruitless)}; the last one: {why}")
    if cause == "crash" and not progressed and _is_repeated(outcome, earlier):
        return Decision(cause, "stop", f"{why}; as in the attempt before, so that one more would end there too")
    if limits.max_attempts is not None and len(earlier) + 1 >= limits.max_attempts:
        return Decision(cause, "stop", f"{why}; resilience.max_attempts={limits.max_attempts} is used up")
    if scheduler is not None and scheduler.requeued:
        return Decision(cause, "requeue", f"{why}; Slurm has queued the job again")
    if limits.continue_by == "never":
        return Decision(cause, "stop", f"{why}; cluster.requeue=never")
    return Decision(cause, limits.continue_by, why)


def decide_at_start(finished: bool, history: Iterable[Attempt], restarted: bool, limits: Limits) -> Decision | None:
    """Whether an attempt that was just started has anything to do; `None` if it has.

    Args:
        finished: whether the run is already finished.
        history: the earlier attempts of the same chain; all of them have their end.
        restarted: whether the scheduler has started this job before.
        limits: what the configuration allows.
    """
    earlier = list(history)
    if finished:
        return Decision("finished", "finish", "the run is already finished; nothing is left to do")
    if not earlier:
        return None
    last = earlier[-1]
    if restarted and last.decision == "stop" and (last.end or {}).get("requeued_by_slurm"):
        return Decision(str(last.cause), "stop", f"Slurm queued the job again after this was decided: {last.reason}")
    fruitless = attempts_without_progress(earlier)
    if last.cause == "lost" and 0 < limits.max_attempts_without_progress <= fruitless:
        return Decision("lost", "stop", f"{_fruitless(fruitless)}; the last one: {last.reason}")
    return None


def find_cause(outcome: Outcome, limits: Limits, scheduler: SchedulerState | None) -> tuple[str, str]:
    """Cause of an attempt's end, and the same in words."""
    failure = outcome.failure
    if outcome.all_finished:
        return "finished", "the run is finished"
    if failure is not None and failure.cause == "user_error":
        return "user_error", f"rank {failure.rank} on {failure.host}: {failure.error}"
    if outcome.asked == "stop":
        return "stopped", "asked to stop" + _saved(outcome)
    if outcome.asked == "preempt":
        return "preempted", "preempted by request" + _saved(outcome)
    if scheduler is not None:
        cause = _cause_by_slurm(outcome, limits, scheduler)
        if cause is not None:
            return cause
    elif named := [cause for cause in outcome.log_causes if cause != "cancelled"]:
        return named[-1], f"Slurm names the cause in the logs ({named[-1]}), but does not answer" + _saved(outcome)
    return _cause_by_ranks(outcome)


def _cause_by_slurm(outcome: Outcome, limits: Limits, scheduler: SchedulerState) -> tuple[str, str] | None:
    named = [cause for cause in outcome.log_causes if cause != "cancelled"]
    saved = _saved(outcome)
    if outcome.lost_nodes:
        return "node_failure", f"{', '.join(outcome.lost_nodes)} failed" + saved
    if scheduler.requeued:
        cause = named[-1] if named else "requeued"
        return cause, _WORDS[cause] + saved
    if not scheduler.running:
        if named and named[-1] != "requeued":
            return named[-1], _WORDS[named[-1]] + saved
        if scheduler.timed_out:
            return "time_limit", _WORDS["time_limit"] + saved
        if scheduler.preempted and not outcome.log_causes:
            return "preempted", _WORDS["preempted"] + saved
        return "cancelled", _WORDS["cancelled"] + saved
    if scheduler.preempted:
        return "preempted", _WORDS["preempted"] + saved
    if "node_failure" in named:
        return "node_failure", _WORDS["node_failure"] + saved
    if outcome.failure is None and not outcome.silent:
        return _asked_while_running(outcome, limits, scheduler)
    return None


def _asked_while_running(outcome: Outcome, limits: Limits, scheduler: SchedulerState) -> tuple[str, str]:
    """Ranks saved and ended though Slurm wants nothing yet: the early signal, or somebody's `scancel -s`."""
    left = scheduler.seconds_left
    if left is not None and left <= limits.save_lead_s + SAID_EARLY_S:
        return "time_limit", f"{max(0, left):.0f} s before the time limit" + _saved(outcome)
    names = {record.signal for record in outcome.records.values() if record.signal}
    if "SIGTERM" in outcome.signals:
        return "stopped", "asked to stop by SIGTERM to the batch shell" + _saved(outcome)
    if "SIGUSR2" in names:
        return "preempted", "asked by SIGUSR2 to save and go on later" + _saved(outcome)
    return "stopped", f"asked to stop by {', '.join(sorted(names)) or 'a signal'}" + _saved(outcome)


def _cause_by_ranks(outcome: Outcome) -> tuple[str, str]:
    failure, death = outcome.failure, outcome.first_death
    if death is not None:
        return "crash", f"rank {death.rank} was {death.error}"
    if outcome.verdict and (failure is None or failure.echo):
        return "crash", outcome.verdict
    if failure is not None:
        where = f"rank {failure.rank} on {failure.host}"
        at = "" if failure.step is None else f" after step {failure.step}"
        return "crash", f"{where} failed{at}: {failure.error}"
    if outcome.silent:
        return "crash", _silent_death(outcome)
    return "preempted", "asked to stop" + _saved(outcome)


def _silent_death(outcome: Outcome) -> str:
    """Words for ranks that ended without a record, where no rank is known to have been killed."""
    # srun itself may be killed; a rank that was is told before this.
    first = next(((name, code) for name, code in outcome.exit_codes.items() if code), None)
    if first is not None and first[1] < 0:
        hint = " (out of memory?)" if first[1] == -9 else ""
        return f"{first[0]} was killed by {signal_name(-first[1])}{hint}"
    codes = ", ".join(f"{name} {code}" for name, code in outcome.exit_codes.items() if code)
    last = f": {outcome.last_words}" if outcome.last_words else ""
    silent = f"{len(outcome.silent)} of {outcome.world_size} ranks ended without a word"
    return f"{silent} (exit code of {codes or 'all: 0'}){last}"


_WORDS = {
    "preempted": "preempted by Slurm",
    "time_limit": "the time limit was reached",
    "requeued": "requeued by `scontrol requeue`",
    "cancelled": "cancelled (scancel); a cancelled run is not requeued",
    "node_failure": "a node failed",
}


def _saved(outcome: Outcome) -> str:
    steps = [
        record.step for record in outcome.records.values() if record.cause == "preempted" and record.step is not None
    ]
    if steps:
        return f"; state saved at step {max(steps)}"
    if outcome.any_stopped:
        return "; state saved"
    failure = outcome.failure
    return "; state not saved" if failure is None else f"; state not saved (rank {failure.rank}: {failure.error})"


_BY_PLACE = re.compile(
    r"^[\w.]*(OSError|IOError|FileNotFound|Permission|Timeout|Connection|Memory|Rendezvous|Communication)\w*"
    r"|errno|cuda|hip|\becc\b|device|memory|no space|quota|stale",
    re.IGNORECASE,
)
"""Errors that a node, its disks or its neighbours may cause: the next attempt may get others."""

_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


def _is_repeated(outcome: Outcome, earlier: list[Attempt]) -> bool:
    """Whether the attempt before ended after the same step with the same exception, which no other place would mend."""
    failure, last = outcome.failure, earlier[-1] if earlier else None
    if last is None or last.cause != "crash" or outcome.first_death is not None:
        return False
    if failure is None or failure.echo or not failure.error:
        return False
    before = (last.end or {}).get("first_failure") or {}
    same = _ADDRESS.sub("", str(before.get("error"))) == _ADDRESS.sub("", failure.error)
    blameless = not is_echo(failure.error) and _BY_PLACE.search(failure.error) is None
    return blameless and same and before.get("step") == failure.step


def _fruitless(count: int) -> str:
    return f"{count} attempts in a row ended without a new checkpoint (resilience.max_attempts_without_progress)"
