"""Everything beside the step hangs on here: callbacks are told what happened, on every rank, in its order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dthpc.parallel.memory import StateBytes
    from dthpc.train.loop import Training


@dataclass(frozen=True)
class StepRecord:
    """One optimizer update; the same on all ranks but for `seconds`."""

    step: int
    """Updates made, this one included."""

    loss: float
    """Mean over all targets of the global batch, in nats."""

    lr: float
    """Learning rate of the update."""

    grad_norm: float
    """Global gradient norm before clipping."""

    targets: int
    """Targets of the global batch."""

    samples: int
    """Samples used so far, this step's included."""

    seconds: float
    """Time of the step on this rank, data wait included, evaluations and checkpoints not."""

    data_wait: float
    """Seconds that the ranks waited for data, on average."""

    loss_scale: float | None = None
    """What the loss was multiplied by; None for formats that need no scaling, and so for the next two."""

    skipped_steps: int | None = None
    """Updates left out in the run so far, this one perhaps among them, because gradients overflowed."""

    overflows: int | None = None
    """Steps of the run so far whose gradients were not finite."""


@dataclass(frozen=True)
class MemoryRecord:
    """Bytes of parameters, gradients and optimizer state on one rank."""

    step: int
    """Updates made."""

    measured: StateBytes
    """Of live storages."""

    expected: StateBytes
    """By formula."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on held-out data."""

    step: int
    """Updates made."""

    loss: float
    """Mean over all evaluated targets, in nats."""

    bits_per_byte: float | None
    """The same in bits for each byte of text; None where the data has no bytes to count."""

    targets: int
    """Targets evaluated, over all ranks."""

    seconds: float
    """Time that it took."""

    whole: bool
    """Whether all held-out samples took part."""


@dataclass(frozen=True)
class CheckpointRecord:
    """One committed checkpoint."""

    step: int
    """Updates made."""

    path: Path
    """Its folder."""

    seconds: float
    """Time for which training waited."""

    size: int | None
    """Bytes on storage, where known."""


class Callback:
    """Derive from this, override what you need, and name the class under `callbacks`.

    Methods are called on every rank, so one that communicates must do so on all of them, and one that writes should
    write where `training.context.is_first`. A callback may read the model, and must not change it.
    """

    def on_train_start(self, training: Training) -> None:
        """Everything is built and restored; no step of this attempt has run."""

    def on_step(self, training: Training, record: StepRecord) -> None:
        """A step is done, and its loss is known: during the forward pass of the next step, or before an evaluation."""

    def on_memory(self, training: Training, record: MemoryRecord) -> None:
        """An attempt's first update is made, so that the optimizer's state exists. The record is this rank's own."""

    def on_eval(self, training: Training, record: EvalRecord) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, training: Training, record: CheckpointRecord) -> None:
        """A checkpoint is committed."""

    def on_stop(self, training: Training, signal: str) -> None:
        """The ranks agreed to stop before the end; the state will be saved next."""

    def on_incident(self, training: Training, what: str, why: str) -> None:
        """Something went wrong that training goes on after, such as a full disk at a checkpoint."""

    def on_train_end(self, training: Training) -> None:
        """All steps are done, evaluated and saved."""
