"""ZeRO-3: which parameters are gathered together, and when (Rajbhandari et al. 2020, section 5.3).

The units are the blocks of a chunk: what lists, dictionaries and sequences of modules hold. The rest of the chunk is
its root unit, which is gathered at the chunk's first pass and let go at the end of the step: its layers (embedding,
output) are the first and the last to be used, so letting go of them in between would lower no peak.

A block is gathered before its forward pass and let go after it, and again around its backward pass, while the next
one's gathering is under way. Blocks must be called as modules are (`block(x)`), in the same order on all data-parallel
ranks. A parameter that several blocks share belongs to the root unit.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dthpc.comm.collectives import Channel, Pending
from dthpc.parallel.sharding.bucket import Bucket

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together."""

    chunk: int
    module: nn.Module | None
    """The block; None for the root unit."""

    buckets: list[Bucket] = field(default_factory=list)


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """What containers hold; a container in a container stands for what it holds, as it may never be called."""
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from find_blocks(child)


class Units:
    """Gathers parameters when passes need them, and lets go of them."""

    def __init__(self, chunks: Sequence[nn.Module], channel: Channel, keep_last: bool) -> None:
        """Find the units.

        Args:
            chunks: this rank's chunks of layers.
            channel: to the ranks that hold the shares.
            keep_last: whether a chunk's backward pass follows its forward pass at once, so that the last block stays.
        """
        self._channel = channel
        self._keep_last = keep_last
        self._roots = [Unit(number, None) for number in range(len(chunks))]
        self._blocks = [
            [Unit(number, block) for block in find_blocks(chunk) if any(p.requires_grad for p in block.parameters())]
            for number, chunk in enumerate(chunks)
        ]
        self._all = [unit for root, blocks in zip(self._roots, self._blocks, strict=True) for unit in (root, *blocks)]
        self._of: dict[nn.Parameter, int] = {}
        for number, chunk in enumerate(chunks):
            self._assign(number, chunk)
        self._holders: dict[Bucket, set[Unit]] = {}
        self._pending: dict[Bucket, Pending] = {}
        self._in_backward = False

    def _assign(self, number: int, chunk: nn.Module) -> None:
        """Find each parameter's unit: the block in which all its names are, or else the root of its first chunk."""
        names = Counter(parameter for _, parameter in chunk.named_parameters(remove_duplicate=False))
        owners: dict[nn.Parameter, Unit] = {}
        for unit in self._blocks[number]:
            assert unit.module is not None
            inside = Counter(parameter for _, parameter in unit.module.named_parameters(remove_duplicate=False))
            owners.update({parameter: unit for parameter, count in inside.items() if count == names[parameter]})
        for parameter in names:
            if parameter in self._of:
                owner = self._roots[self._all[self._of[parameter]].chunk]
            else:
                owner = owners.get(parameter, self._roots[number])
            self._of[parameter] = self._all.index(owner)

    def unit_of(self, parameter: nn.Parameter) -> int:
        """Number of the unit that gathers a parameter."""
        return self._of[parameter]

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets, one unit's each, and watch the blocks' passes."""
        for bucket in buckets:
            assert bucket.kind.unit is not None
            owner = self._all[bucket.kind.unit]
            owners = [owner] if owner.module is not None else [self._roots[chunk] for chunk in bucket.kind.chunks]
            for unit in owners:
                unit.buckets.append(bucket)
            self._holders[bucket] = set()
        # The blocks must not keep these units, and with them the group of ranks, in a circle.
        me = weakref.ref(self)
        for chunk, blocks in enumerate(self._blocks):
            for place, unit in enumerate(blocks):
                assert unit.module is not None
                unit.module.register_forward_pre_hook(partial(_enter, me, chunk, place))
                unit.module.register_forward_hook(partial(_leave, me, chunk, place), with_kwargs=True)

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Around a forward pass of a chunk."""
        self._hold(self._roots[chunk])
        try:
            yield
        except BaseException:
            self.release_all()
            raise
        kept = self._blocks[chunk][-1:] if self._keeps() else []
        for unit in self._blocks[chunk]:
            if unit not in kept:
                self._drop(unit)
        if not torch.is_grad_enabled():
            self._drop(self._roots[chunk])

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Around a backward pass of a chunk."""
        self._hold(self._roots[chunk])
        self._in_backward = True
        try:
            yield
        except BaseException:
            self.release_all()
            raise
        finally:
            self._in_backward = False
        for unit in self._blocks[chunk]:
            self._drop(unit)

    def release_all(self) -> None:
        """Let go of everything that is gathered."""
        for unit in self._all:
            self._drop(unit)

    def _keeps(self) -> bool:
        return self._keep_last and torch.is_grad_enabled()

    def enter(self, chunk: int, place: int) -> None:
        """Before a block's forward pass."""
        blocks = self._blocks[chunk]
        self._hold(blocks[place])
        if place + 1 < len(blocks) and not self._in_backward:
            self._start(blocks[place + 1])

    def leave(self, chunk: int, place: int, inputs: Any, outputs: Any) -> None:
        """After a block's forward pass."""
        unit = self._blocks[chunk][place]
        before = self._blocks[chunk][place - 1] if place else None
        # Within a backward pass a forward pass makes activations anew, and the backward pass of the block follows.
        if self._in_backward:
            return
        if not (self._keeps() and unit is self._blocks[chunk][-1]):
            self._drop(unit)
        if not torch.is_grad_enabled():
            return
        for tensor in _differentiable(outputs):
            tensor.register_hook(partial(self._before_backward, unit, before))  # type: ignore[no-untyped-call]
        taken = _differentiable(inputs)
        # A leaf's gradient may be there before those of the block's parameters; the end of the pass is near then.
        if taken and not any(tensor.is_leaf for tensor in taken):
            torch.autograd.graph.register_multi_grad_hook(taken, lambda _: self._after_backward(unit))

    def _before_backward(self, unit: Unit, before: Unit | None, gradient: Tensor) -> None:
        if not self._in_backward:
            raise RuntimeError("a backward pass runs outside of `Shards.backward`, which gathers what it needs")
        self._hold(unit)
        if before is not None:
            self._start(before)

    def _after_backward(self, unit: Unit) -> None:
        self._drop(unit)

    def _start(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            if not self._holders[bucket]:
                assert bucket.values is not None
                bucket.claim()
                self._pending[bucket] = self._channel.all_gather(bucket.values, bucket.mine)
            self._holders[bucket].add(unit)

    def _hold(self, unit: Unit) -> None:
        self._start(unit)
        for bucket in unit.buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def _drop(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            holders = self._holders[bucket]
            if unit not in holders:
                continue
            holders.discard(unit)
            if not holders:
                pending = self._pending.pop(bucket, None)
                if pending is not None:
                    pending.wait()
                bucket.release()


def _enter(units: weakref.ref[Units], chunk: int, place: int, module: nn.Module, inputs: Any) -> None:
    alive = units()
    if alive is not None:
        alive.enter(chunk, place)


def _leave(
    units: weakref.ref[Units], chunk: int, place: int, module: nn.Module, inputs: Any, named: Any, outputs: Any
) -> None:
    alive = units()
    if alive is not None:
        alive.leave(chunk, place, (inputs, named), outputs)


def _differentiable(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
