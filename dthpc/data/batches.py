"""Cutting a rank's share of a step into micro-batches, and moving it to the device; batches may be nests of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def rows(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of its first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch.shape[0]


def micro_batches(
    inputs: Any, targets: Any, size: int | None, passes: int | None, device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """Parts of a batch of at most `size` samples each, on the device.

    Args:
        inputs: of the whole batch.
        targets: of the whole batch.
        size: samples of a part; None: the whole batch.
        passes: number of parts, of which the last may be short or empty; None: as many as have samples, so none if the
            batch is empty.
        device: where to.
    """
    count = rows(inputs)
    size = size or max(1, count)
    for number in range(passes if passes is not None else -(-count // size)):
        start, stop = number * size, (number + 1) * size

        def part(tensor: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return tensor[start:stop].to(device, non_blocking=True)

        yield _map(inputs, part), _map(targets, part)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(inner, function) for key, inner in value.items()}
    return [_map(inner, function) for inner in value]
