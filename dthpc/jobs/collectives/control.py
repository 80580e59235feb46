"""What the ranks agree on between measurements: a few numbers and objects over the group of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dthpc.resilience.stop import StopFlag, Stopped


class Control:
    """Small exchanges between all ranks, in CPU memory."""

    def __init__(self, stop: StopFlag) -> None:
        """Take the flag that says whether this rank was asked to stop."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._stop = stop

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, place by place."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, values: Sequence[float]) -> list[float]:
        """The smallest of all ranks' values, place by place."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def total(self, value: float) -> float:
        """The sum of all ranks' values."""
        return self._reduced([value], dist.ReduceOp.SUM)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._reduced([0.0], dist.ReduceOp.MAX)

    def end_if_asked(self) -> None:
        """Raise `Stopped` on all ranks if any was asked to stop: what was measured so far is not kept."""
        if self.largest([float(self._stop.requested is not None)])[0]:
            raise Stopped

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if tensor.numel() and self.size > 1:
            dist.all_reduce(tensor, op)
        return [float(value) for value in tensor]
