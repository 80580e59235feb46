"""What the states of a training take on this rank, measured and by formula."""

from __future__ import annotations

import torch

from dthpc.parallel.memory import StateBytes, expected, measure
from dthpc.parallel.model import ParallelModel
from dthpc.train.callbacks import MemoryRecord


def memory_record(model: ParallelModel, optimizer: torch.optim.Optimizer, step: int) -> MemoryRecord:
    """Bytes of this rank's states, between steps.

    The formula is told by how many bytes the optimizer keeps for an element, since it may be any: with AdamW the result
    is that of `dthpc.parallel.memory`.

    Args:
        model: on its mesh.
        optimizer: of the model's pieces, after an update.
        step: updates made.
    """
    bits16 = model.precision.storage != torch.float32
    moments = bytes_of_element(optimizer)
    trained = [part for parameter, part in model.parts.items() if parameter.requires_grad]
    formula = expected(
        trained,
        zero=model.layout.zero,
        shard=model.layout.shard,
        matrix=StateBytes(2, 2, 4 + moments) if bits16 else StateBytes(4, 4, moments),
        vector=StateBytes(4, 4, moments),
        in_common=model.shards.holds_in_common,
    )
    return MemoryRecord(step, measure(model.shards, optimizer), formula)


def bytes_of_element(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state that an optimizer keeps for an element, beside a few numbers for each piece; 0 without pieces."""
    largest = max(optimizer.state, key=torch.Tensor.numel, default=None)
    if largest is None:
        return 0
    kept = [value for value in optimizer.state[largest].values() if isinstance(value, torch.Tensor)]
    return sum(value.element_size() for value in kept if value.shape == largest.shape)
