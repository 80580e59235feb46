"""Writing checkpoints of a training, and removing those that nobody needs any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dthpc.checkpoint.retain import retain
from dthpc.checkpoint.store import save
from dthpc.errors import UserError
from dthpc.parallel.model import ParallelModel
from dthpc.resilience.attempts import is_current
from dthpc.rundir import RunDir
from dthpc.train.callbacks import CheckpointRecord
from dthpc.train.state import TrainState, live_state


@dataclass(frozen=True)
class Saver:
    """Where and how checkpoints of this run are kept."""

    run: RunDir
    """The run."""

    attempt: int
    """Number of this attempt."""

    every: int
    """Steps between checkpoints; 0: none between start and end."""

    keep: int
    """Checkpoints to keep; 0: all."""

    keep_every: int
    """Keep for good those whose step is a multiple of this; 0: none."""

    meta: dict[str, Any]
    """Facts that a checkpoint must share with the run that restores it, such as which text it was trained on."""

    removes: bool
    """Whether this rank is the one that removes old checkpoints."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after that many steps."""
        return bool(self.every) and step % self.every == 0

    def save(self, model: ParallelModel, optimizer: torch.optim.Optimizer, state: TrainState) -> CheckpointRecord:
        """Commit a checkpoint; collective.

        Raises:
            CheckpointError: it failed, on all ranks; the older ones are as they were.
        """
        live = live_state(model, optimizer, state)
        root = self.run.checkpoints
        info = save(root, state.step, live, attempt=self.attempt, meta=self.meta, guard=self._refuse_if_superseded)
        if self.removes and self.keep:
            retain(root, self.keep, every=self.keep_every or None)
        return CheckpointRecord(state.step, info.path, info.seconds, info.bytes)

    def _refuse_if_superseded(self) -> None:
        # A node that Slurm gave up as lost may live on, and still reach the shared file system.
        if not is_current(self.run, self.attempt):
            raise UserError(f"attempt {self.attempt} may save no more: a later attempt of this run has begun")
