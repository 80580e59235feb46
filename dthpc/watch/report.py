"""What is known of a run at one moment: the facts behind `status`, for people and, as JSON, for scripts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
"""Version of the JSON form; it changes when a field changes its meaning or goes, not when one is added."""

WAITING = ("pending", "requeued", "held")
ACTIVE = ("running", "saving")
ENDED = ("finished", "stopped", "cancelled", "failed", "lost")
STATES = (*WAITING, *ACTIVE, *ENDED)
"""Every state: waiting to start, at work, over. `requeued` waits for its next attempt, `stopped` was stopped on request
with its state saved, `lost` should run by its own records and does not."""


@dataclass
class AttemptReport:
    """One attempt."""

    number: int
    """Number, from 0."""

    job_id: str | None = None
    """Slurm job."""

    pid: int | None = None
    """Process of its keeper, on the first of its nodes."""

    restart_count: int | None = None
    """How often Slurm had restarted the job."""

    nodes: list[str] = field(default_factory=list)
    """Names of its nodes."""

    started: float | None = None
    """Unix seconds."""

    ended: float | None = None
    """Unix seconds; `None` while it runs, or where nothing recorded its end."""

    cause: str | None = None
    """Why it ended, in one word."""

    decision: str | None = None
    """What the keeper decided then."""

    reason: str | None = None
    """Why it decided so, in one line."""

    progressed: bool = False
    """Whether it left a checkpoint that was not there before."""

    def duration(self, now: float) -> float | None:
        """Seconds it took, or has taken so far; `None` where its end is not known."""
        if self.started is None:
            return None
        return (now if self.ended is None else self.ended) - self.started


@dataclass
class FailureReport:
    """The rank that failed first, in the newest attempt in which one did."""

    attempt: int
    """Number of the attempt."""

    rank: int | None
    """Number of the rank; `None` where nobody could tell which one it was."""

    cause: str
    """`crash`, `user_error`, or `no record` where the rank could not leave one (killed by the system, for instance)."""

    host: str | None = None
    """Its node."""

    error: str | None = None
    """The error in one line."""

    step: int | None = None
    """Last step that it had done."""

    log: str | None = None
    """Path of its log."""

    log_tail: list[str] = field(default_factory=list)
    """Last lines of its log."""


@dataclass
class CheckpointReport:
    """The newest checkpoint that verifies."""

    step: int
    """Its step."""

    path: str
    """Its folder."""

    verified: str
    """`quick` (names, sizes and manifest) or `full` (every checksum)."""


@dataclass
class PendingReport:
    """Why Slurm has not started the job yet."""

    reason: str | None = None
    """Slurm's word for it, such as `Priority`."""

    start: float | None = None
    """When Slurm expects to start it, unix seconds."""


@dataclass
class RunReport:
    """One run. Every number is `None` where it is not known."""

    name: str
    """Name of the run."""

    path: str
    """Its folder."""

    state: str = "lost"
    """One of `STATES`."""

    why: str | None = None
    """One line: why it is in this state, or why it ended."""

    conflict: str | None = None
    """One line where Slurm and the run's own records disagree."""

    kind: str | None = None
    """`local`, `slurm` or `allocation`."""

    job_id: str | None = None
    """Slurm job of the newest attempt or submission."""

    job_state: str | None = None
    """What Slurm says of it, such as `RUNNING`; `None` where it does not know it or was not asked."""

    step: int | None = None
    """Optimizer updates made."""

    total_steps: int | None = None
    """Updates to make in all."""

    loss: float | None = None
    """Training loss, in nats a target."""

    eval_step: int | None = None
    """Step of the newest evaluation."""

    eval_loss: float | None = None
    """Held-out loss, in nats a target."""

    bits_per_byte: float | None = None
    """Held-out bits per byte."""

    bigram_bits_per_byte: float | None = None
    """The same of a bigram model."""

    unit: str = "token"
    """What one target is: a token, an image, or what the data call it."""

    tokens_per_s: float | None = None
    """Targets a second over all ranks, in the newest record."""

    step_time: float | None = None
    """Seconds a step, in the newest record."""

    eta_s: float | None = None
    """Seconds until the last step at the recent pace."""

    silent_s: float | None = None
    """Seconds without news from a run that should give some."""

    submitted: float | None = None
    """Unix seconds."""

    updated: float | None = None
    """Time of the newest event, unix seconds."""

    awaits_start: bool = False
    """Whether no attempt has begun since the newest submission."""

    pending: PendingReport | None = None
    """For a job that waits in Slurm's queue."""

    checkpoint: CheckpointReport | None = None
    """The newest verified checkpoint."""

    rejected: list[str] = field(default_factory=list)
    """Newer checkpoints that do not verify, with the reasons."""

    attempts: list[AttemptReport] = field(default_factory=list)
    """All attempts, in order."""

    failure: FailureReport | None = None
    """The first failing rank, if the newest attempt had one."""

    summary: dict[str, Any] | None = None
    """The event that closed the training."""

    unreadable: list[str] = field(default_factory=list)
    """Files that could not be read, with the reasons."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come by itself."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, every field always present; non-finite numbers as text, since JSON has none."""
        return {key: _json(value) for key, value in asdict(self).items()}


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_json(inner) for inner in value]
    return value
