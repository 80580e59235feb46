"""Collectives on flat tensors, each in the form that its backend does fastest.

Gloo makes a reduce-scatter out of an all-reduce (13.9 ms for 16 MB on 2 ranks, against 9.2 ms for the all-reduce and
4.7 ms for exchanging halves), so there each rank sends every peer its share and adds what it gets, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """A collective on its way; `wait` may be called once."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is there."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum in place over the group."""
    return Pending([dist.all_reduce(flat, group=group, async_op=True)])


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Pending:
    """Concatenate the ranks' `mine` `[n]` into `out` `[size · n]`; `mine` may be this rank's slice of `out`."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Pending([gather(out, mine, group=group, async_op=True)])


def reduce_scatter(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `flat` `[size · n]` over the group, of which this rank gets its n elements in `out`.

    `out` may be this rank's slice of `flat`. `flat` must stay as it is until `wait` returns. The sum is taken in the
    order of the ranks, so it does not depend on timing.
    """
    if dist.get_backend(group) != "gloo":
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Pending([scatter(out, flat, group=group, async_op=True)])
    return _exchange_and_add(out, flat, group)


def _exchange_and_add(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Pending:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shares = flat.chunk(size)
    received = [shares[rank] if peer == rank else torch.empty_like(out) for peer in range(size)]
    works: list[Any] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        works.append(dist.isend(shares[target], group=group, group_dst=target))
        works.append(dist.irecv(received[source], group=group, group_src=source))

    def add() -> None:
        total = received[0] if size == 1 else torch.add(received[0], received[1])
        for other in received[2:]:
            total.add_(other)
        out.copy_(total)

    return Pending(works, add)
