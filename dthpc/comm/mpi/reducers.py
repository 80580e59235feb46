"""Collectives that reduce: by MPI where it knows the reduction, else by an exchange of operands and our own rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dthpc.comm.mpi.buffers import Buffers
from dthpc.comm.mpi.collectives import Collectives
from dthpc.comm.mpi.operation import Steps
from dthpc.comm.mpi.reductions import Reductions, Rule
from dthpc.comm.mpi.sizes import overlap, shape

_WHOLE_BYTES = 16384
"""All operands together up to this size are given to all ranks, in one step: fewer messages."""


class Reducers:
    """The reducing collectives of a communicator."""

    def __init__(self, collectives: Collectives) -> None:
        self._move = collectives
        self._mpi, self._comm = collectives.mpi, collectives.comm
        self._buffers: Buffers = collectives.buffers
        self._rank, self._size = collectives.rank, collectives.size
        self._reductions = Reductions(collectives.mpi, collectives.size)

    def rule(self, tensor: Tensor, op: Any) -> Rule:
        """How a reduction is done; raises ValueError where it has no meaning."""
        if tensor.layout != torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout} can't be reduced; reduce its parts, or to_dense()")
        return self._reductions.rule(tensor.dtype, op)

    def staged(self, rule: Rule, tensor: Tensor) -> bool:
        """Whether an all-reduce takes two steps that communicate."""
        return rule.combine is not None and not self._whole(tensor)

    def all_reduce(self, tensor: Tensor, rule: Rule) -> Steps:
        """Reduce in place; all ranks get the same bits."""
        source = tensor if rule.before is None else rule.before(tensor)
        buffer = self._buffers.readable(source)
        if rule.combine is not None:
            yield from self._all_reduce_here(buffer, tensor, rule)
            return
        pieces = self._buffers.pieces(buffer)
        yield [
            self._comm.Iallreduce(self._mpi.IN_PLACE, self._buffers.spec(piece, rule.datatype), rule.operation)
            for piece in pieces
        ]
        if rule.after is not None:
            rule.after(buffer)
        self._buffers.deliver(buffer, tensor)

    def reduce(self, tensor: Tensor, rule: Rule, root: int) -> Steps:
        """Reduce into the root's tensor; the others keep theirs."""
        source = self._buffers.readable(tensor if rule.before is None else rule.before(tensor))
        if rule.combine is not None:
            yield from self._reduce_here(source, tensor, rule, root)
            return
        requests = []
        for piece in self._buffers.pieces(source):
            spec = self._buffers.spec(piece, rule.datatype)
            send, receive = (self._mpi.IN_PLACE, spec) if self._rank == root else (spec, None)
            requests.append(self._comm.Ireduce(send, receive, rule.operation, root))
        yield requests
        if self._rank == root:
            if rule.after is not None:
                rule.after(source)
            self._buffers.deliver(source, tensor)

    def reduce_scatter(self, out: Tensor, shares: Sequence[Tensor], rule: Rule) -> Steps:
        """Reduce `shares`, one for each rank and of any sizes, of which this rank gets its own in `out`."""
        if out.numel() != shares[self._rank].numel() or any(share.dtype != out.dtype for share in shares):
            raise ValueError(f"output is {shape(out)}, and this rank's share {shape(shares[self._rank])}")
        yield from self._reduce_scatter(out, self._flat(shares, rule), [share.numel() for share in shares], rule)

    def reduce_scatter_flat(self, out: Tensor, flat: Tensor, rule: Rule) -> Steps:
        """The same with a tensor `[size · n]` of which every rank gets n elements."""
        if out.numel() * self._size != flat.numel() or out.dtype != flat.dtype:
            raise ValueError(f"output is {shape(out)}, and input {shape(flat)} for {self._size} ranks")
        source = self._buffers.readable(flat if rule.before is None else rule.before(flat))
        yield from self._reduce_scatter(out, source.view(-1), [out.numel()] * self._size, rule)

    def _reduce_scatter(self, out: Tensor, flat: Tensor, counts: list[int], rule: Rule) -> Steps:
        if rule.combine is not None or self._move.too_many(flat):
            combine = rule.combine or _plain(rule.name)
            received = yield from self._collect(flat, counts)
            total = combine(received)
            if rule.combine is None and rule.after is not None:
                rule.after(total)
            self._buffers.deliver(total.view(out.shape), out)
            return
        room = self._buffers.writable(out)
        if overlap(room, flat):
            room = self._buffers.room(out)
        send = self._buffers.spec(flat, rule.datatype)
        receive = self._buffers.spec(room, rule.datatype)
        if len(set(counts)) == 1:
            # mpi4py wants the count of one block for both.
            block = [send[0], receive[1], rule.datatype]
            yield [self._comm.Ireduce_scatter_block(block, receive, rule.operation)]
        else:
            yield [self._comm.Ireduce_scatter(send, receive, counts, rule.operation)]
        if rule.after is not None:
            rule.after(room)
        self._buffers.deliver(room, out)

    # --- our own ----------------------------------------------------------------------------------------------------

    def _all_reduce_here(self, source: Tensor, tensor: Tensor, rule: Rule) -> Steps:
        assert rule.combine is not None
        flat = source.view(-1)
        if self._whole(tensor):
            everything = self._buffers.room(source, self._size * flat.numel())
            yield from self._move.all_gather(everything, flat)
            total = rule.combine(list(everything.chunk(self._size)) if flat.numel() else [flat])
        else:
            counts = [share.numel() for share in flat.tensor_split(self._size)]
            received = yield from self._collect(flat, counts)
            total = self._buffers.room(source, flat.numel())
            yield from self._move.all_gather_uneven(total.split_with_sizes(counts), rule.combine(received))
        self._buffers.deliver(total.view(tensor.shape), tensor)

    def _reduce_here(self, source: Tensor, tensor: Tensor, rule: Rule, root: int) -> Steps:
        assert rule.combine is not None
        flat = source.view(-1)
        counts = [share.numel() for share in flat.tensor_split(self._size)]
        received = yield from self._collect(flat, counts)
        total = self._buffers.room(source, flat.numel()) if self._rank == root else None
        parts = None if total is None else list(total.split_with_sizes(counts))
        yield from self._move.gather(parts, rule.combine(received), root)
        if total is not None:
            self._buffers.deliver(total.view(tensor.shape), tensor)

    def _collect(self, flat: Tensor, counts: list[int]) -> Any:
        """Give every rank its share of this one's operands; returns all ranks' for this rank, in their order."""
        own = counts[self._rank]
        received = self._buffers.room(flat, self._size * own)
        parts = list(received.view(self._size, own))
        yield from self._move.all_to_all(parts, flat.split_with_sizes(counts))
        return parts

    def _flat(self, shares: Sequence[Tensor], rule: Rule) -> Tensor:
        flat, parts = self._move.parts(shares)
        for part, share in zip(parts, shares, strict=True):
            if part is not share:
                part.copy_(share)
        return flat if rule.before is None else rule.before(flat)

    def _whole(self, tensor: Tensor) -> bool:
        return bool(self._size == 2 or tensor.nbytes * self._size <= _WHOLE_BYTES)


def _plain(name: str) -> Any:
    """A reduction that MPI knows, done here because its counts are too large for the library."""
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    others = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, **bits}
    function: Any = others.get(name, torch.add)

    def combine(parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = function(total, part)
        return total

    return combine
