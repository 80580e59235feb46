"""The tensor-parallel axis as its layers see it: who takes part, and the exchanges they make, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dthpc.comm.collectives import BufferPool, Channel
from dthpc.errors import UserError
from dthpc.parallel.mesh import Mesh

Finish = Callable[[], Tensor]
"""Waits for an exchange that was started, and returns its result; may be called once."""


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place among those that share its layers.

    The sequence is dimension 1 of `[B, T, …]`. Nothing is sent for a tensor without elements: all ranks of the axis
    work on the same samples, so they all skip it.
    """

    channel: Channel
    """The ranks' way to talk, in their order."""

    pool: BufferPool
    """Room for what is on its way."""

    index: int
    """This one."""

    size: int
    """The tensor-parallel degree."""

    sequence_parallel: bool
    """Whether the sequence is split between matrices."""

    @classmethod
    def of(cls, mesh: Mesh, sequence_parallel: bool) -> TensorAxis:
        """The axis `tp` of a mesh, whose degree must be above 1."""
        pool = BufferPool()
        channel = mesh.channel("tp", pool)
        if channel is None:
            raise ValueError("the mesh has no tensor-parallel axis")
        return cls(channel, pool, mesh.index("tp"), mesh.size("tp"), sequence_parallel)

    def share(self, total: int, index: int | None = None) -> tuple[int, int]:
        """First index and length of a rank's share of `total`; lengths differ by at most one, longer ones first."""
        index = self.index if index is None else index
        base, longer = divmod(total, self.size)
        return index * base + min(index, longer), base + (index < longer)

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Sum a contiguous tensor over the axis, in place."""
        if not x.numel():
            return lambda: x
        pending = self.channel.all_reduce(x.view(-1))

        def finish() -> Tensor:
            pending.wait()
            return x

        return finish

    def start_gather(self, x: Tensor) -> Finish:
        """Put the ranks' parts of the sequence, `[B, T / size, …]`, together: `[B, T, …]`."""
        batch, length, *rest = x.shape
        if not x.numel():
            return lambda: x.new_empty(batch, self.size * length, *rest)
        x = x.contiguous()
        if batch == 1:
            parts = x.new_empty(self.size * x.numel())
        else:
            parts = self.pool.take(self.size * x.numel(), x.dtype, x.device)
        pending = self.channel.all_gather(parts, x.view(-1))

        def finish() -> Tensor:
            pending.wait()
            if batch == 1:
                return parts.view(1, self.size * length, *rest)
            whole = x.new_empty(batch, self.size, length, *rest)
            whole.copy_(parts.view(self.size, *x.shape).transpose(0, 1))
            self.pool.give(parts)
            return whole.view(batch, self.size * length, *rest)

        return finish

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        """Sum `[B, T, …]` over the axis; this rank gets its part of the sequence, `[B, T / size, …]`."""
        batch, length, *rest = x.shape
        short = self.check_sequence(length)
        mine = x.new_empty(batch, short, *rest)
        if not x.numel():
            return lambda: mine
        if batch == 1:
            parts = x.contiguous().view(-1)
        else:
            parts = self.pool.take(x.numel(), x.dtype, x.device)
            by_rank = x.reshape(batch, self.size, short, *rest).transpose(0, 1)
            parts.view(by_rank.shape).copy_(by_rank)
        pending = self.channel.reduce_scatter(mine.view(-1), parts)

        def finish() -> Tensor:
            pending.wait()
            if batch > 1:
                self.pool.give(parts)
            return mine

        return finish

    def slice_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence of `[B, T, …]`; a view."""
        short = self.check_sequence(x.shape[1])
        return x.narrow(1, self.index * short, short)

    def check_sequence(self, length: int) -> int:
        """Length of a rank's part of the sequence.

        Raises:
            UserError: the sequence does not divide.
        """
        if length % self.size:
            raise UserError(
                f"a sequence of {length} positions does not divide among {self.size} tensor-parallel ranks",
                key="parallel.sequence_parallel",
                value="true",
                instead=f"a sequence of {length + self.size - length % self.size}, or parallel.sequence_parallel=false",
            )
        return length // self.size

    def gather_shares(self, x: Tensor, total: int) -> Tensor:
        """Put the ranks' shares of the last dimension, uneven where `total` does not divide, together: `[…, total]`."""
        if not x.numel() and not x.shape[:-1].numel():
            return x.new_empty(*x.shape[:-1], total)
        longest = self.share(total, 0)[1]
        # Rows of one length travel; the spare element of a shorter share is never read.
        padded = F.pad(x, (0, longest - x.shape[-1])).contiguous()
        parts = x.new_empty(self.size, *padded.shape)
        self.channel.all_gather(parts.view(-1), padded.view(-1)).wait()
        return torch.cat([parts[rank][..., : self.share(total, rank)[1]] for rank in range(self.size)], dim=-1)
