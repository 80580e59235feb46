"""Sums of ranks that share a node, through memory where that is faster than what MPI does.

What only moves data stays with MPI: libraries copy it from one process to the other at once, where a window takes two
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dthpc.comm.mpi.buffers import Buffers
from dthpc.comm.mpi.operation import Steps
from dthpc.comm.mpi.reductions import Rule
from dthpc.comm.mpi.runtime import Runtime
from dthpc.comm.mpi.sizes import fits, overlap, shape
from dthpc.comm.shared.exchange import Exchange, Ticket

LEAST = 1 << 20
"""Bytes of all operands of a rank from which memory is faster; from 16 MiB it is so by far (`benchmarks/mpi_backend.py
--only all_reduce reduce_scatter`)."""

_SUMS = {"SUM", "AVG", "PREMUL_SUM"}
_SUMMED = {
    torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip
_ROUNDED = {torch.float16, torch.bfloat16}


class Near:
    """The sums through memory of one group; of one whose ranks share none, it takes nothing."""

    def __init__(self, exchange: Exchange | None, buffers: Buffers, give: Any = None) -> None:
        """Take the way through memory.

        Args:
            exchange: it; None: there is none.
            buffers: makes buffers out of tensors.
            give: takes the way back when the group ends.
        """
        self._exchange, self._buffers, self._give = exchange, buffers, give

    def close(self) -> None:
        """End, when nothing is under way."""
        if self._exchange is not None:
            self._give(self._exchange)
            self._exchange = None

    def reduces(self, tensor: Tensor, rule: Rule) -> bool:
        """Whether it is to reduce a tensor: sums of numbers, with the bits that `Rule` promises."""
        if self._exchange is None or tensor.nbytes < LEAST or tensor.is_cuda or rule.name not in _SUMS:
            return False
        if tensor.dtype in _SUMMED:
            return True
        # Of two summands the order does not matter.
        return tensor.dtype in _ROUNDED and self._exchange.size == 2 and rule.name == "SUM"

    def all_reduce(self, tensor: Tensor, rule: Rule) -> Steps:
        """Sum in place; all ranks get the same bits."""
        buffer = self._buffers.readable(tensor if rule.before is None else rule.before(tensor))
        yield [_Coming(self._way.all_reduce(buffer.view(-1)))]
        if rule.after is not None:
            rule.after(buffer)
        self._buffers.deliver(buffer, tensor)

    def reduce_scatter_flat(self, out: Tensor, flat: Tensor, rule: Rule) -> Steps:
        """Sum a tensor `[size · n]` of which every rank gets n elements."""
        fits(out.numel() * self._way.size == flat.numel() and out.dtype == flat.dtype,
             f"output is {shape(out)}, and input {shape(flat)} for {self._way.size} ranks")  # fmt: skip
        source = self._buffers.readable(flat if rule.before is None else rule.before(flat)).view(-1)
        room = self._buffers.writable(out)
        if overlap(room, source):
            room = self._buffers.room(out)
        yield [_Coming(self._way.reduce_scatter(room.view(-1), list(source.chunk(self._way.size)), False))]
        if rule.after is not None:
            rule.after(room)
        self._buffers.deliver(room, out)

    @property
    def _way(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange


def near(runtime: Runtime, comm: Any, members: Sequence[int], buffers: Buffers) -> Near:
    """The way through memory of a group that is being made; collective.

    Args:
        runtime: this process's MPI.
        comm: the group's communicator.
        members: the default group's ranks, in the group's order.
        buffers: the group's.
    """
    windows = runtime.windows
    if windows is None:
        return Near(None, buffers)
    ranks = [runtime.ranks[member] for member in members]
    return Near(windows.take(comm, ranks), buffers, lambda exchange: windows.give(exchange, ranks))


class _Coming:
    """A collective on its way, as something that MPI does."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def Test(self) -> bool:
        """Whether it is complete; takes what has come."""
        return self._ticket.ready()
