"""What a run's events add up to: the numbers that the bar, the table and the summary show."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dthpc.monitor.units import integer, number, text

KINDS = (
    "run_submitted",
    "not_started",
    "attempt_start",
    "ranks_ready",
    "train_start",
    "step",
    "eval",
    "checkpoint_saved",
    "stop_requested",
    "attempt_end",
    "train_end",
    "report",
)
"""Kinds of events that `Progress` takes its numbers from."""

RECENT_STEPS = 20
"""Step records over which the pace of a run is measured."""

STALLED_STEPS = 10
"""A run that is silent for the time of this many records (and a minute) has no ETA that one could believe."""


@dataclass
class Progress:
    """State of a run by its own events, in the order in which they were applied; every field is `None` until known."""

    step: int | None = None
    """Optimizer updates made; after a restart, the step it resumed from until the next record."""

    total_steps: int | None = None
    """Updates that the run is to make."""

    loss: float | None = None
    """Mean training loss of the newest record, in nats a target."""

    lr: float | None = None
    """Learning rate of the newest record."""

    grad_norm: float | None = None
    """Gradient norm before clipping."""

    step_time: float | None = None
    """Seconds a step, over the steps of the newest record."""

    unit: str = "token"
    """What one target is; the fields that are named after tokens count these."""

    tokens_per_s: float | None = None
    """Targets a second, over all ranks."""

    data_wait: float | None = None
    """Seconds a step that the ranks waited for data."""

    samples: int | None = None
    """Samples used so far."""

    samples_per_step: int | None = None
    """Samples in one step, over all ranks."""

    tokens_per_step: int | None = None
    """Tokens in one step, over all ranks."""

    parameters: int | None = None
    """Parameters of the model."""

    world_size: int | None = None
    """Ranks of the newest attempt."""

    resumed_from: int | None = None
    """Step that the newest attempt went on from; `None` for a fresh start."""

    eval_step: int | None = None
    """Step of the newest evaluation."""

    eval_loss: float | None = None
    """Held-out loss, in nats a target."""

    bits_per_byte: float | None = None
    """Held-out bits per byte of text."""

    bigram_bits_per_byte: float | None = None
    """The same of a bigram model: the baseline."""

    checkpoint_step: int | None = None
    """Step of the newest checkpoint that the run says it saved."""

    checkpoint_time: float | None = None
    """When that was, unix seconds."""

    job_id: str | None = None
    """Slurm job of the newest attempt or submission."""

    submitted_job: str | None = None
    """Slurm job of the newest submission."""

    keeper_pid: int | None = None
    """Process that the newest submission started, where that was not Slurm's business."""

    launcher: str | None = None
    """`local`, `slurm` or `allocation`."""

    submitted: float | None = None
    """Time of the newest submission, unix seconds."""

    not_started: str | None = None
    """Why the keeper of a sweep passed the newest submission over, where it did."""

    attempt: int | None = None
    """Newest attempt."""

    trains: bool = False
    """Whether the newest attempt has made a step, so that there is something to save."""

    stop_signal: str | None = None
    """Signal that asked the current attempt to stop, until that attempt ends."""

    attempt_end: dict[str, Any] | None = None
    """How the newest attempt ended, until the next one starts."""

    train_end: dict[str, Any] | None = None
    """The event that closes the training."""

    report: dict[str, Any] | None = None
    """What a job that does not train leaves for the last screen: `tables` and `rows`."""

    last_time: float | None = None
    """Time of the newest event, unix seconds."""

    _pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS), repr=False)

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event in."""
        moment = number(event.get("time"))
        if moment is not None:
            self.last_time = moment
        attempt = integer(event.get("attempt"))
        if attempt is not None:
            self.attempt = attempt
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is not None:
            handler(event, moment)

    def seconds_per_step(self) -> float | None:
        """Pace over the recent records, evaluations and checkpoints between them included."""
        if len(self._pace) >= 2:
            (first_time, first_step), (last_time, last_step) = self._pace[0], self._pace[-1]
            if last_step > first_step and last_time > first_time:
                return (last_time - first_time) / (last_step - first_step)
        return self.step_time

    def eta(self, now: float) -> float | None:
        """Seconds until the last step at the recent pace; `None` where nobody can know (not training, stalled)."""
        pace = self.seconds_per_step()
        if pace is None or self.step is None or self.total_steps is None or not self._pace:
            return None
        if self.attempt_end is not None or self.stop_signal is not None or self.train_end is not None:
            return None
        if self.stalled_for(now) is not None:
            return None
        return max(0.0, (self.total_steps - self.step) * pace - (now - self._pace[-1][0]))

    def stalled_for(self, now: float) -> float | None:
        """Seconds without any event, where that is far longer than the run's own rhythm; else `None`."""
        pace = self.seconds_per_step()
        if pace is None or self.last_time is None or not self._pace:
            return None
        every = 1
        if len(self._pace) >= 2:
            every = max(1, self._pace[-1][1] - self._pace[-2][1])
        silence = now - self.last_time
        return silence if silence > max(60.0, STALLED_STEPS * every * pace) else None

    def _on_run_submitted(self, event: dict[str, Any], moment: float | None) -> None:
        self.submitted, self.not_started = moment, None
        self.attempt_end = self.stop_signal = self.train_end = None
        launcher = text(event.get("launcher"))
        if launcher in ("local", "slurm", "allocation"):
            self.launcher = launcher  # a keeper that submits its own continuation names itself otherwise
        self.keeper_pid = self.submitted_job = None
        if launcher in ("local", "allocation"):
            self.keeper_pid = integer(event.get("job_id"))
        else:
            self.submitted_job = text(event.get("job_id"))
            self.job_id = self.submitted_job or self.job_id

    def _on_not_started(self, event: dict[str, Any], moment: float | None) -> None:
        self.not_started = text(event.get("why")) or "its keeper passed it over"

    def _on_attempt_start(self, event: dict[str, Any], moment: float | None) -> None:
        self.not_started, self.trains = None, False
        self.job_id = text(event.get("job_id")) or self.job_id
        self.attempt_end = self.stop_signal = self.train_end = self.report = None
        self.step_time = self.tokens_per_s = self.data_wait = None
        self._pace.clear()

    def _on_ranks_ready(self, event: dict[str, Any], moment: float | None) -> None:
        self.world_size = integer(event.get("world_size")) or self.world_size

    def _on_train_start(self, event: dict[str, Any], moment: float | None) -> None:
        self.total_steps = integer(event.get("total_steps")) or self.total_steps
        self.unit = text(event.get("unit")) or "token"
        self.samples_per_step = integer(event.get("samples_per_step")) or self.samples_per_step
        self.tokens_per_step = integer(event.get("tokens_per_step")) or self.tokens_per_step
        self.parameters = integer(event.get("params")) or self.parameters
        self.resumed_from = integer(event.get("resumed_from"))
        self.step = integer(event.get("step")) or 0
        self.train_end, self.trains = None, False
        self._pace.clear()

    def _on_step(self, event: dict[str, Any], moment: float | None) -> None:
        self.step, self.trains = integer(event.get("step")), True
        for name in ("loss", "lr", "grad_norm", "step_time", "tokens_per_s", "data_wait"):
            setattr(self, name, number(event.get(name)))
        self.samples = integer(event.get("samples"))
        if moment is not None and self.step is not None:
            self._pace.append((moment, self.step))

    def _on_eval(self, event: dict[str, Any], moment: float | None) -> None:
        self.eval_step = integer(event.get("step"))
        self.eval_loss = number(event.get("loss"))
        self.bits_per_byte = number(event.get("bits_per_byte"))
        baseline = number(event.get("bigram_bits_per_byte"))
        self.bigram_bits_per_byte = self.bigram_bits_per_byte if baseline is None else baseline

    def _on_checkpoint_saved(self, event: dict[str, Any], moment: float | None) -> None:
        self.checkpoint_step = integer(event.get("step"))
        if self.checkpoint_step is not None:
            self.step = max(self.step or 0, self.checkpoint_step)  # not every step has a record of its own
        self.checkpoint_time = moment

    def _on_report(self, event: dict[str, Any], moment: float | None) -> None:
        self.report = event

    def _on_stop_requested(self, event: dict[str, Any], moment: float | None) -> None:
        self.stop_signal = text(event.get("signal")) or "stop"
        step = integer(event.get("step"))
        if step is not None and step > (self.resumed_from or 0):
            self.step, self.trains = max(self.step or 0, step), True  # not every step has a record of its own

    def _on_attempt_end(self, event: dict[str, Any], moment: float | None) -> None:
        self.attempt_end = event
        self.stop_signal = None

    def _on_train_end(self, event: dict[str, Any], moment: float | None) -> None:
        self.train_end = event
        self.step = integer(event.get("step")) if event.get("step") is not None else self.step
        self.stop_signal = None


def fold(events: list[dict[str, Any]]) -> Progress:
    """The progress that a list of events, in order, adds up to."""
    progress = Progress()
    for event in events:
        progress.apply(event)
    return progress
