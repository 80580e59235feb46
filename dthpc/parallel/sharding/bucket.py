"""One flat storage of parameters of a kind, of their gradients, and the pieces of it that this rank updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dthpc.comm.collectives import BufferPool
from dthpc.parallel.offload import Offload
from dthpc.parallel.parts import Part, Piece
from dthpc.parallel.sharding.rooms import NOWHERE, Rooms


@dataclass(frozen=True)
class Kind:
    """What the parameters of a bucket have in common."""

    dtype: torch.dtype
    """Format of the storage."""

    device: torch.device
    """Where it is."""

    chunks: tuple[int, ...]
    """The chunks that use them."""

    unit: int | None
    """The unit that gathers them (ZeRO-3)."""

    split: bool
    """Whether tensor-parallel ranks hold different parts. Equal copies get buckets of their own, in which they lie in
    the same places on all of those ranks: sums over data-parallel ranks depend on the place, in their last bits."""

    partial: bool
    """Whether their gradients are added over tensor-parallel ranks."""

    tied: int | None
    """Pipeline rank that holds copies of them."""


@dataclass(eq=False)
class Slot:
    """A parameter's place in its bucket."""

    parameter: nn.Parameter
    part: Part
    start: int
    stop: int

    filled: bool = False
    """Whether the bucket's full gradients hold this one's."""

    used: bool = False
    """Whether a gradient came in this step."""

    hooked: bool = False
    """Whether it came from autograd in this step, rather than from a pass for weights alone."""

    expected: dict[int, int] = field(default_factory=dict)
    """Gradients that come in the reducing pass of each chunk, once one was seen."""

    due: int = 0
    """Those of the pass at hand."""

    count: int = 0
    """Gradients that came in the pass at hand."""


class Bucket:
    """Flat storages, padded to a multiple of the shards: `[size]` whole, `[size / shards]` this rank's share.

    Whatever the stage, gradients arrive in `full` and leave as `share`:

        stage   values                          full gradients          share
        0       the parameters' own (fp32)      always there            the same
        1       whole                           always there            a slice of them
        2       whole                           from first to reduction its own
        3       whole while gathered            from first to reduction its own

    A bucket of a single parameter takes the gradient that autograd made for its full gradients, without a copy.
    """

    def __init__(
        self,
        kind: Kind,
        parameters: list[tuple[nn.Parameter, Part]],
        shards: int,
        index: int,
        zero: int,
        offload: Offload | None = None,
        rooms: Rooms = NOWHERE,
    ) -> None:
        """Lay the parameters out.

        Args:
            kind: theirs.
            parameters: in the order in which gradients are expected; fp32, holding their values.
            shards: data-parallel ranks that divide the bucket among them.
            index: this rank's place among those.
            zero: ZeRO stage; without effect where `shards` is 1.
            offload: places what is updated, and shards of parameters; None: beside the passes.
            rooms: memory that other ranks see, for those storages that lie there.
        """
        self.kind = kind
        self.rooms = rooms
        self._offload = offload if offload is not None else Offload(kind.device)
        self.slots: list[Slot] = []
        offset = 0
        for parameter, part in parameters:
            self.slots.append(Slot(parameter, part, offset, offset + parameter.numel()))
            offset += parameter.numel()
        self.shards = shards
        self.count = offset
        self.size = -(-offset // shards) * shards
        self.low = self.size // shards * index
        self.high = self.low + self.size // shards
        self.nbytes = self.size * kind.dtype.itemsize
        self.launched = False
        self.missing = 0
        self.summed = False
        self.every_pass = zero >= 2
        self.sharded_values = zero == 3 and rooms.values is None
        self._has_masters = kind.dtype != torch.float32 or self._offload.moves("optimizer")
        self._make_values(flat=zero > 0 or self._has_masters)
        self._adopts = len(self.slots) == 1 and self.count == self.size and rooms.gradients is None
        self.adopted = False
        self._share = self._empty(self.size // shards) if self.every_pass else None
        self.full: Tensor | None = None
        if not self.every_pass and not self._adopts:
            self.full = self._empty(self.size) if rooms.gradients is None else rooms.gradients
            self.full[self.count :].zero_()
        self.update: Tensor | None = None
        self.pieces = self._make_pieces()

    def _empty(self, elements: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(elements, dtype=dtype or self.kind.dtype, device=self.kind.device)

    def _make_values(self, flat: bool) -> None:
        """Move the parameters into flat storage; the fp32 masters are made from the values before rounding."""
        self.values: Tensor | None = None
        self.masters: Tensor | None = None
        self.local: Tensor | None = None
        if not flat:
            return
        whole = torch.zeros(self.size, dtype=torch.float32, device=self.kind.device)
        for slot in self.slots:
            whole[slot.start : slot.stop].copy_(slot.parameter.detach().flatten())
        mine = slice(self.low, self.high)
        if self.rooms.values is None:
            self.values = whole.to(self.kind.dtype)
        else:
            # The other ranks write their shares.
            self.values = self.rooms.values
            self.values[mine].copy_(whole[mine])
        if self._has_masters:
            self.masters = self._offload.place(whole[mine].clone(), "optimizer")
        if self.sharded_values:
            self.local = self._offload.place(self.values[mine].clone(), "parameters")
        for slot in self.slots:
            slot.parameter.data = self.values[slot.start : slot.stop].view(slot.parameter.shape)
        if self.sharded_values:
            self.release()

    def _make_pieces(self) -> list[Piece]:
        if self.values is None:
            return [Piece(slot.part, 0, slot.parameter.numel(), slot.parameter) for slot in self.slots]
        held = self.local if self.masters is None else self.masters
        mine = self.values[self.low : self.high] if held is None else held
        pieces = []
        for slot in self.slots:
            low, high = max(slot.start, self.low), min(slot.stop, self.high)
            if low < high:
                tensor = nn.Parameter(mine[low - self.low : high - self.low])
                pieces.append(Piece(slot.part, low - slot.start, high - slot.start, tensor))
        return pieces

    # Values ----------------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> Tensor:
        """This rank's share of the values, in the format of the storage; a copy on the device if it lies elsewhere."""
        return self._kept.to(self.kind.device)

    @property
    def _kept(self) -> Tensor:
        assert self.values is not None
        return self.values[self.low : self.high] if self.local is None else self.local

    def round_masters(self) -> None:
        """Write the masters to the storage that passes use."""
        if self.masters is not None:
            self._kept.copy_(self.masters)

    @property
    def gathered(self) -> bool:
        """Whether the whole values are there."""
        return self.values is None or self.values.untyped_storage().nbytes() > 0

    def claim(self) -> None:
        """Make room for the whole values, and let the parameters be views of it."""
        assert self.values is not None
        self.values.untyped_storage().resize_(self.size * self.values.element_size())
        for slot in self.slots:
            slot.parameter.data = self.values[slot.start : slot.stop].view(slot.parameter.shape)

    def release(self) -> None:
        """Let go of the whole values.

        What autograd saved of the parameters is whole again when the storage is. Whoever else uses one meanwhile reads
        NaN rather than memory that is gone.
        """
        assert self.values is not None
        self.values.untyped_storage().resize_(0)
        nothing = torch.full((), torch.nan, dtype=self.kind.dtype, device=self.kind.device)
        for slot in self.slots:
            slot.parameter.data = nothing.expand(slot.parameter.shape)

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> Tensor:
        """This rank's share of the gradients."""
        if self._share is not None:
            return self._share
        assert self.full is not None
        return self.full[self.low : self.high]

    def receive(self, slot: Slot, gradient: Tensor, in_place: bool, pool: BufferPool) -> None:
        """Take a gradient; the first of a step replaces what the storage held, so that nothing need be zeroed.

        Args:
            slot: the parameter's.
            gradient: of its shape.
            in_place: whether it is the parameter's `.grad`.
            pool: room for transient gradients.
        """
        if in_place and self.full is None and self._adopts and self._can_adopt(gradient):
            self.full, self.adopted, slot.filled = gradient.view(-1), True, True
            return
        view = self.view(slot, pool)
        if not slot.filled:
            view.copy_(gradient)
            slot.filled = True
        elif gradient.data_ptr() != view.data_ptr():
            view.add_(gradient)
        slot.parameter.grad = view

    def view(self, slot: Slot, pool: BufferPool) -> Tensor:
        """A parameter's place in the full gradients."""
        if self.full is None:
            kind = self.kind
            self.full = pool.take(self.size, kind.dtype, kind.device) if self.every_pass else self._empty(self.size)
            self.full[self.count :].zero_()
        return self.full[slot.start : slot.stop].view(slot.parameter.shape)

    def _can_adopt(self, gradient: Tensor) -> bool:
        """Whether a gradient is the parameter's alone; autograd may give two parameters views of one."""
        return (
            gradient.dtype == self.kind.dtype
            and gradient.layout == torch.strided
            and gradient.is_contiguous()
            and _references(gradient) == _ALONE
        )

    def complete(self, pool: BufferPool) -> Tensor:
        """The full gradients; those that did not come are zero."""
        for slot in self.slots:
            if not slot.filled:
                view = self.view(slot, pool)
                view.zero_()
                slot.parameter.grad = view
                slot.filled = True
        assert self.full is not None
        return self.full

    def detach(self) -> None:
        """Take full gradients that are on their way out of the parameters' sight (stages 2 and 3)."""
        self.full, self.adopted = None, False
        self.forget()

    def drop(self, pool: BufferPool) -> None:
        """Drop the gradients of a step."""
        if self.full is not None and self.every_pass and not self.adopted:
            pool.give(self.full)
        if self.every_pass or self._adopts:
            self.full, self.adopted = None, False
        self.update = None
        self.forget()

    def forget(self) -> None:
        """Take the parameters' gradients from them."""
        for slot in self.slots:
            slot.parameter.grad = None
            slot.filled = False

    def present(self) -> None:
        """Have the gradients ready for norms, scaling and the update, in fp32; pieces beside them get theirs."""
        self.update = self.share if self.kind.dtype == torch.float32 else self.share.float()
        if self.shards > 1:
            self.forget()
        if self.values is None:
            for slot in () if self.adopted else self.slots:
                slot.parameter.grad = self.update[slot.start : slot.stop].view(slot.parameter.shape)
        elif not self._offload.active:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the pieces their gradients, wherever they lie."""
        if self.values is None or not self.pieces:
            return
        assert self.update is not None
        update, at = self.update.to(self.pieces[0].tensor.device), 0
        for slot in self.slots:
            low, high = max(slot.start, self.low), min(slot.stop, self.high)
            if low < high:
                self.pieces[at].tensor.grad = update[low - self.low : high - self.low]
                at += 1

    def dismiss(self) -> None:
        """Let go of copies of gradients that were made for the update."""
        if self.kind.dtype != torch.float32:
            self.update = None
        if self.kind.dtype != torch.float32 or self._offload.active:
            for piece in self.pieces:
                piece.tensor.grad = None

    @property
    def counted(self) -> list[tuple[int, int]]:
        """Ranges of the share whose elements count in norms, merged where they touch."""
        ranges: list[tuple[int, int]] = []
        for slot in self.slots:
            low, high = max(slot.start, self.low) - self.low, min(slot.stop, self.high) - self.low
            if low >= high or not slot.part.counts:
                continue
            if ranges and ranges[-1][1] == low:
                ranges[-1] = (ranges[-1][0], high)
            else:
                ranges.append((low, high))
        return ranges


_count_of: Any = getattr(torch._C, "_storage_Use_Count", None)


def _references(tensor: Tensor) -> int:
    """How many hold a tensor's storage; 0 where torch does not tell."""
    return int(_count_of(tensor.untyped_storage()._cdata)) if _count_of is not None else 0


_ALONE = max(1, _references(torch.empty(1)))
