"""The tensor-parallel axis as its layers see it: who takes part, and the exchanges they make, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm import collectives
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

    group: dist.ProcessGroup
    """The ranks, in order."""

    index: int
    """This one."""

    size: int
    """The tensor-parallel degree."""

    sequence_parallel: bool
    """Whether the sequence is split between matrices."""

    @classmethod
    def of(cls, mesh: Mesh, sequence_parallel: bool) -> TensorAxis:
        """The axis `tp` of a mesh, whose degree must be above 1."""
        group = mesh.group("tp")
        if group is None:
            raise ValueError("the mesh has no tensor-parallel axis")
        return cls(group, mesh.index("tp"), mesh.size("tp"), sequence_parallel)

    def share(self, total: int, index: int | None = None) -> tuple[int, int]:
        """First index and length of a rank's share of `total`; lengths differ by at most one, longer ones first."""
        index = self.index if index is None else index
        base, longer = divmod(total, self.size)
        return index * base + min(index, longer), base + (index < longer)

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Sum a contiguous tensor over the axis, in place."""
        if not x.numel():
            return lambda: x
        pending = collectives.all_reduce(x.view(-1), self.group)

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
        parts = x.new_empty(self.size, batch, length, *rest)
        pending = collectives.all_gather(parts.view(-1), x.view(-1), self.group)

        def finish() -> Tensor:
            pending.wait()
            return parts.transpose(0, 1).reshape(batch, self.size * length, *rest)

        return finish

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        """Sum `[B, T, …]` over the axis; this rank gets its part of the sequence, `[B, T / size, …]`."""
        batch, length, *rest = x.shape
        short = self.check_sequence(length)
        if not x.numel():
            return lambda: x.new_empty(batch, short, *rest)
        parts = x.reshape(batch, self.size, short, *rest).transpose(0, 1).contiguous()
        mine = x.new_empty(batch, short, *rest)
        pending = collectives.reduce_scatter(mine.view(-1), parts.view(-1), self.group)

        def finish() -> Tensor:
            pending.wait()
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
        padded = torch.nn.functional.pad(x, (0, longest - x.shape[-1])).contiguous()
        parts = x.new_empty(self.size, *padded.shape)
        collectives.all_gather(parts.view(-1), padded.view(-1), self.group).wait()
        return torch.cat([parts[rank][..., : self.share(total, rank)[1]] for rank in range(self.size)], dim=-1)
