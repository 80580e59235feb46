"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dthpc.checkpoint.errors import CheckpointError
from dthpc.data.loader import StepBatch, StepLoader
from dthpc.errors import UserError
from dthpc.parallel.model import ParallelModel
from dthpc.resilience.stop import Stopped
from dthpc.train.callbacks import Callback, EvalRecord, StepRecord
from dthpc.train.evaluate import evaluate
from dthpc.train.header import Agreed, Header
from dthpc.train.memory import memory_record
from dthpc.train.optim import set_learning_rate
from dthpc.train.saver import Saver
from dthpc.train.schedule import learning_rate
from dthpc.train.seeds import seed_step
from dthpc.train.state import TrainState
from dthpc.train.step import expected_count, forward_backward

if TYPE_CHECKING:
    from dthpc.context import RankContext


@dataclass
class Training:
    """All that a training consists of; built by the job."""

    config: Any
    """The whole configuration."""

    context: RankContext
    """Who this rank is, and where the run lives."""

    data: Any
    """Object with `train` and, unless nothing is ever evaluated, `valid` data sets."""

    model: ParallelModel
    """The model on its mesh."""

    optimizer: torch.optim.Optimizer
    """Updates the pieces of parameters that this rank holds."""

    header: Header
    """What the ranks agree on in each step."""

    saver: Saver
    """Writes checkpoints."""

    callbacks: Sequence[Callback] = ()
    """Told of everything that happens."""

    state: TrainState = field(default_factory=TrainState)
    """How far training has come."""

    resumed_from: int | None = None
    """Step of the checkpoint that this attempt goes on from."""

    pending: StepRecord | None = field(default=None, init=False)
    """The newest step, with this rank's sum of losses in `loss`, until the sum over all ranks is known."""

    last_step: StepRecord | None = field(default=None, init=False)
    """The newest step whose loss is known."""

    last_eval: EvalRecord | None = field(default=None, init=False)
    """The newest evaluation of this attempt."""

    last_saved: int | None = field(default=None, init=False)
    """Step of the newest checkpoint that this attempt restored or wrote."""

    memory_told: bool = field(default=False, init=False)
    """Whether this attempt has told what its states take."""

    def tell(self, what: str, *arguments: Any) -> None:
        """Call one method of every callback."""
        for callback in self.callbacks:
            getattr(callback, what)(self, *arguments)


def train(t: Training) -> None:
    """Train from where `t.state` stands to the last step.

    Raises:
        Stopped: the ranks agreed to stop; the state of this step boundary is saved.
        FloatingPointError: a loss or gradient is not finite; on all ranks at the same step.
    """
    seed, stream, device = t.config.run.seed, t.model.random_stream, t.context.device
    rate_of = learning_rate(t.config.optim, t.config.train)
    first, steps = t.state.step, t.config.train.steps
    t.tell("on_train_start")
    with _loader(t) as loader:
        while t.state.step < steps:
            began = time.perf_counter()
            batch = next(loader)
            _send_header(t, batch)
            seed_step(seed, t.state.step, stream, device)
            rate, scale = rate_of(t.state.step), t.model.scaler.scale
            set_learning_rate(t.optimizer, rate)
            agreed, loss_sum = forward_backward(
                t.model, batch, t.header, device, step=t.state.step, first=t.state.step == first
            )
            _settle(t, agreed)
            if agreed.stop is not None:
                _stop(t, agreed.stop)
            norm = t.model.update(t.optimizer, t.config.train.grad_clip, last=t.state.step + 1 == steps)
            _check_norm(t, norm)
            seconds = time.perf_counter() - began
            _advance(t, _record(t, batch, agreed, loss_sum, rate, norm, seconds, scale))
            _at_boundary(t)
    _finish(t)


def _loader(t: Training) -> StepLoader:
    left = t.config.train.steps - t.state.step
    return StepLoader(
        t.data.train,
        seed=t.config.run.seed,
        global_batch=t.config.train.global_batch,
        dp_rank=t.model.layout.dp_rank(t.context.identity.rank),
        dp_size=t.model.layout.dp,
        start_sample=t.state.samples,
        total_samples=t.state.samples + left * t.config.train.global_batch,
    )


def _send_header(t: Training, batch: StepBatch) -> None:
    """Tell the other ranks this one's part of the step; it travels during the forward pass."""
    counts = t.model.layout.counts_data(t.context.identity.rank)
    t.header.send(
        targets=expected_count(t.model.loss, batch.targets) if counts else 0,
        loss=t.pending.loss if t.pending else 0.0,
        data_wait=batch.waited_s,
        stop=t.context.stop.requested,
    )


def _record(
    t: Training,
    batch: StepBatch,
    agreed: Agreed,
    loss_sum: float,
    rate: float,
    norm: float,
    seconds: float,
    scale: float,
) -> StepRecord:
    """The step that was just made, with this rank's sum of losses; `scale` is the loss scale of its backward passes."""
    scaler = t.model.scaler
    return StepRecord(
        step=t.state.step + 1,
        loss=loss_sum,
        lr=rate,
        grad_norm=norm,
        targets=agreed.targets,
        samples=batch.consumed,
        seconds=seconds,
        data_wait=agreed.data_wait,
        loss_scale=scale if scaler.dynamic else None,
        skipped_steps=scaler.skipped if scaler.dynamic else None,
        overflows=scaler.overflows if scaler.dynamic else None,
    )


def _advance(t: Training, made: StepRecord) -> None:
    """Count a step; its loss is settled with the next exchange."""
    t.state.step, t.state.samples = made.step, made.samples
    t.context.step = made.step
    t.pending = made
    if not t.memory_told and math.isfinite(made.grad_norm):
        t.memory_told = True
        t.tell("on_memory", memory_record(t.model, t.optimizer, made.step))


def _settle(t: Training, agreed: Agreed) -> None:
    """The loss of the step before is known now: check it and tell the callbacks."""
    if t.pending is None:
        return
    record = replace(t.pending, loss=agreed.loss / max(1, t.pending.targets))
    t.pending = None
    _check_finite("the loss", record.loss, record.step)
    t.last_step = record
    t.tell("on_step", record)


def _check_norm(t: Training, norm: float) -> None:
    """An overflow that a smaller loss scale can mend is no error: the update was left out."""
    if not t.model.scaler.dynamic:
        _check_finite("the gradient norm", norm, t.state.step + 1)


def _check_finite(what: str, value: float, step: int) -> None:
    if math.isfinite(value):
        return
    if step == 1:
        # No update was made yet, so another attempt would come to the same.
        remedy = "look at the first samples, at what the loss divides by, and at the model's initial values"
        raise UserError(f"step {step}: {what} is {value}, before anything was learnt", instead=remedy)
    remedy = "lower optim.lr, lengthen optim.schedule.warmup_steps or look at the data"
    raise FloatingPointError(f"step {step}: {what} is {value}; {remedy}")


def _at_boundary(t: Training) -> None:
    """Save and evaluate where it is due. Saving comes first: an evaluation may be given up for a stop."""
    step, last = t.state.step, t.config.train.steps
    every = t.config.train.eval_every
    saves = step == last or t.saver.due(step)
    evaluates = every > 0 and step % every == 0 and step < last
    if not (saves or evaluates):
        return
    t.header.send(loss=t.pending.loss if t.pending else 0.0, stop=t.context.stop.requested)
    agreed = t.header.receive()
    _settle(t, agreed)
    if agreed.stop is not None:
        _stop(t, agreed.stop)
    if saves:
        _save(t, must=step == last)
    if evaluates:
        _evaluate(t, t.config.train.eval_samples)


def _evaluate(t: Training, samples: int | None) -> None:
    record = evaluate(t, samples)
    if isinstance(record, str):
        _stop(t, record)
    t.last_eval = record
    t.tell("on_eval", record)


def _save(t: Training, must: bool) -> None:
    """Save the state; where it need not succeed now, training goes on after a failure, and says so."""
    try:
        record = t.saver.save(t.model, t.optimizer, t.state)
    except CheckpointError as error:
        if must:
            raise
        t.tell("on_incident", "checkpoint not saved", str(error))
        return
    t.last_saved = t.state.step
    t.tell("on_checkpoint", record)


def _stop(t: Training, signal: str) -> NoReturn:
    """All ranks are at the same boundary: save it and leave."""
    t.tell("on_stop", signal)
    if t.last_saved != t.state.step:
        _save(t, must=True)
    raise Stopped(t.state.step)


def _finish(t: Training) -> None:
    """The last evaluation takes all held-out samples; it is made again if an earlier attempt was stopped in it."""
    if t.config.train.eval_every >= 0:
        _evaluate(t, None)
    t.tell("on_train_end")
