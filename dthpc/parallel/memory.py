"""What parameters, gradients and optimizer state take on a rank: by formula, and measured from live storages.

The formula is that of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 3 and figure 1), with the bytes of each kind as arguments: their 16-bit training with Adam keeps 2
bytes of a parameter, 2 of its gradient and K = 12 of optimizer state (fp32 master, momentum, variance); fp32 training
4, 4 and 8. Free of torch, but for what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dthpc.parallel.parts import Part
    from dthpc.parallel.sharding.shards import Shards


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state: of one element, or of a rank."""

    parameters: float
    """Of what the forward and backward passes use."""

    gradients: float
    """Of gradients."""

    optimizer: float
    """Of optimizer state, fp32 master weights included where parameters are stored in another format."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


FP32 = StateBytes(4, 4, 8)
"""Of an element in fp32, with an optimizer like Adam that keeps two moments."""

MIXED = StateBytes(2, 2, 12)
"""Of an element in 16 bits with an fp32 master, with the same optimizer."""


def model_state_bytes(
    elements: int, each: StateBytes, zero: int = 0, shard: int = 1, in_common: bool = False
) -> StateBytes:
    """Bytes on a rank.

    Args:
        elements: parameters that the rank's pipeline stages and tensor-parallel parts hold before ZeRO shards them.
        each: bytes of one element.
        zero: ZeRO stage. 1 shards optimizer state, 2 gradients too, 3 parameters too.
        shard: ranks over which is sharded.
        in_common: whether those ranks are on one host and hold one copy of the parameters among them.
    """
    return StateBytes(
        parameters=elements * each.parameters / (shard if zero >= 3 or in_common else 1),
        gradients=elements * each.gradients / (shard if zero >= 2 else 1),
        optimizer=elements * each.optimizer / (shard if zero >= 1 else 1),
    )


def expected(
    parts: Iterable[Part],
    *,
    zero: int = 0,
    shard: int = 1,
    matrix: StateBytes = FP32,
    vector: StateBytes = FP32,
    in_common: bool = False,
) -> StateBytes:
    """Bytes on a rank that holds these parts; matrices (two or more dimensions) and vectors may differ in format."""
    total = StateBytes(0, 0, 0)
    for part in parts:
        each = matrix if len(part.shape) >= 2 else vector
        total += model_state_bytes(math.prod(part.local_shape), each, zero, shard, in_common)
    return total


def measure(shards: Shards, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Bytes of this rank's live storages, each counted once, wherever they lie.

    Between steps it is what the formula counts. In a step, ZeRO 2 and 3 hold the full gradients of a few buckets for
    a while, ZeRO 3 the whole parameters of a few layers, and 16-bit gradients are updated from an fp32 copy.

    Args:
        shards: parameters, fp32 masters and gradients.
        optimizer: of the pieces of `shards`.
    """
    held = shards.storage_bytes()
    state = (value for entries in optimizer.state.values() for value in entries.values())
    return StateBytes(held["parameters"], held["gradients"], held["masters"] + storage_bytes(state))


def storage_bytes(values: Iterable[object]) -> int:
    """Bytes of the storages of those values that are tensors; storages that several tensors share count once."""
    storages = [value.untyped_storage() for value in values if hasattr(value, "untyped_storage")]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
