"""What the ranks agree on in each step: one small all-reduce that travels while the forward pass runs.

It carries the number of targets of the step (so that the loss is the mean over the global batch, however it is split),
whether some rank was asked to stop (so that all stop at the same boundary), and the loss of the step before (so that a
metric costs no communication of its own).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Agreed:
    """Sums over all ranks of one exchange."""

    targets: int
    """Targets of the step."""

    loss: float
    """Sum of losses of the step before, over its targets, in nats."""

    data_wait: float
    """Seconds that the ranks waited for data, on average."""

    stop: str | None
    """Name of the signal that asks for a stop, or None."""


class Header:
    """The exchange; every rank calls `send` and then `receive`, once each, again and again."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take a group whose backend works on CPU tensors; None for a single process."""
        self._group = group
        self._size = dist.get_world_size(group) if group is not None else 1
        self._values = torch.zeros(5, dtype=torch.float64)
        self._work: Any = None

    def send(self, *, targets: int = 0, loss: float = 0.0, data_wait: float = 0.0, stop: str | None = None) -> None:
        """Give this rank's numbers; they travel from now on."""
        self._values = torch.tensor(
            [targets, loss, data_wait, stop is not None, _signal_number(stop)], dtype=torch.float64
        )
        if self._group is not None:
            self._work = dist.all_reduce(self._values, group=self._group, async_op=True)

    def receive(self) -> Agreed:
        """Wait until all ranks have sent."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        targets, loss, data_wait, asked, signals = self._values.tolist()
        return Agreed(int(targets), loss, data_wait / self._size, _signal_name(asked, signals))


def _signal_number(name: str | None) -> int:
    known = signal.Signals.__members__
    return int(known[name]) if name is not None and name in known else 0


def _signal_name(asked: float, signals: float) -> str | None:
    if not asked:
        return None
    # Ranks usually got one and the same signal; the mean of different ones may be none.
    number = signals / asked
    known = {float(each): each.name for each in signal.Signals}
    return known.get(number, "several signals")
