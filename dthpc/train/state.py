"""How far training has come, and how that and the live objects map to what a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dthpc.checkpoint.state import TrainingState


@dataclass
class TrainState:
    """Two numbers from which a run goes on; everything else is weights and optimizer state."""

    step: int = 0
    """Optimizer updates made."""

    samples: int = 0
    """Samples used: the sampler's whole state."""

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """From what `state_dict` gave."""
        self.step, self.samples = state_dict["step"], state_dict["samples"]


def checkpoint_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> TrainingState:
    """The live objects that a checkpoint is made of, and that a restore fills in place."""
    return TrainingState(model, optimizer, stateful={"train": state})
