"""What came of a training: the numbers of its last event."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dthpc.models.size import flops_per_token
from dthpc.monitor.events import read_events

if TYPE_CHECKING:
    from dthpc.parallel.scaler import LossScaler
    from dthpc.train.callbacks import StepRecord
    from dthpc.train.loop import Training


@dataclass
class Totals:
    """Sums over steps."""

    steps: int = 0
    """Steps added."""

    targets: int = 0
    """Targets of all of them."""

    loss_sum: float = 0.0
    """Sum of losses over all targets, in nats."""

    seconds: float = 0.0
    """Time spent in steps."""

    data_wait: float = 0.0
    """Part of it that was spent waiting for data."""

    eval_seconds: float = 0.0
    """Time spent in evaluations."""

    checkpoint_seconds: float = 0.0
    """Time for which checkpoints held up the training."""

    def add(self, record: StepRecord) -> None:
        """Take one step in."""
        self.steps += 1
        self.targets += record.targets
        self.loss_sum += record.loss * record.targets
        self.seconds += record.seconds
        self.data_wait += record.data_wait

    @property
    def loss(self) -> float:
        """Mean loss over all targets of these steps."""
        return self.loss_sum / max(1, self.targets)


def summarize(t: Training, totals: Totals, bigram_bits_per_byte: float | None) -> dict[str, Any]:
    """The fields of the `train_end` event.

    Args:
        t: the training, which is done.
        totals: over the steps of this attempt.
        bigram_bits_per_byte: the baseline.
    """
    events, _ = read_events(t.context.run.events)
    started = min((event["time"] for event in events if event.get("kind") == "attempt_start"), default=None)
    evaluation, step = t.last_eval, t.last_step
    parameters = t.model.elements
    rate = totals.targets / totals.seconds if totals.steps else None
    flops = flops_per_token(t.config, parameters, getattr(t.data, "vocab_size", None))
    return {
        "step": t.state.step,
        "samples": t.state.samples,
        "loss": step.loss if step else None,
        "eval_loss": evaluation.loss if evaluation else None,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "bigram_bits_per_byte": bigram_bits_per_byte,
        "params": parameters,
        "tokens_per_s": rate,
        "flops_per_s": rate * flops if rate is not None else None,
        "step_time": totals.seconds / totals.steps if totals.steps else None,
        "seconds": time.time() - started if started is not None else None,
        "step_seconds": totals.seconds,
        "data_wait_seconds": totals.data_wait,
        "eval_seconds": totals.eval_seconds,
        "checkpoint_seconds": totals.checkpoint_seconds,
        "lost_seconds": lost_seconds(events),
        "checkpoints": t.saver.run.checkpoints,
        "tensorboard": t.context.run.tensorboard if t.config.monitor.tensorboard else None,
        **scaling_of(t.model.scaler),
    }


def scaling_of(scaler: LossScaler) -> dict[str, Any]:
    """Loss scale at the end, updates left out and overflows of the run; nothing for formats that need no scaling."""
    if not scaler.dynamic:
        return {}
    return {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped, "overflows": scaler.overflows}


@dataclass(frozen=True)
class _Work:
    """Steps that one record tells of."""

    after: int
    """Updates made before the first of them."""

    step: int
    """Updates made after the last of them."""

    each: float
    """Seconds that each took."""

    def since(self, step: int) -> float:
        """Seconds of those that come after a step."""
        return max(0, self.step - max(self.after, step)) * self.each


def lost_seconds(events: Iterable[dict[str, Any]]) -> float:
    """Training time of steps that had to be made again so far: those after the checkpoint that an attempt went on from.

    Every step that was made counts at most once, so that this is never more than the time spent training. Waiting in
    between is not counted, and neither are steps after the last `step` record of an attempt that broke off.
    """
    standing: list[_Work] = []
    at = 0
    lost = 0.0
    for event in events:
        kind = event.get("kind")
        if kind == "train_start":
            at = event.get("resumed_from") or 0
            lost += sum(work.since(at) for work in standing)
            standing = [_Work(work.after, min(work.step, at), work.each) for work in standing if work.after < at]
        elif kind == "step":
            standing.append(_Work(at, event["step"], event["step_time"]))
            at = event["step"]
    return lost
