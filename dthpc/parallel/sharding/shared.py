"""Storages of buckets in memory that the ranks of a host share.

Gradients: each rank's own, at the same place of its part, so that they are summed where they lie.

Values, with ZeRO: one copy among all ranks that shard them, in which each updates its share; nothing is gathered, and a
rank's part of the memory is that of ZeRO-3 whatever the stage. Ranks read it in their passes and write it between
`finish_step` and `publish`, so at both of these they wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dthpc.comm.shared import Exchange, Ticket
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.offload import Offload
from dthpc.parallel.sharding.partition import Group
from dthpc.parallel.sharding.rooms import Rooms

_ALIGNED = 64
"""Bytes: a cache line, beyond which no two buckets meet."""


class SharedStorage:
    """Gives buckets their places, and keeps reading and writing of values apart."""

    def __init__(self, mesh: Mesh, shards: int, zero: int, offload: Offload | None) -> None:
        """Find out what can be shared.

        Args:
            mesh: this rank's groups.
            shards: ranks that divide a bucket among them.
            zero: ZeRO stage.
            offload: where shards are kept between their uses.
        """
        axes = ("shard",) if shards > 1 else ("shard", "replicate")
        summing = next((axis for axis in axes if mesh.size(axis) > 1), None)
        exchange = mesh.exchange(summing) if summing is not None else None
        self._shards = shards
        self._gradients = exchange if zero < 2 else None
        self._values: Exchange | None = exchange if zero and (offload is None or not offload.active) else None
        self._readers: Ticket | None = None

    @property
    def holds_values(self) -> bool:
        """Whether ranks hold one copy of the values among them."""
        return self._values is not None

    def allocate(self, groups: Sequence[Group]) -> list[Rooms]:
        """Places for the buckets of these parameters; collective."""
        sizes = [sum(parameter.numel() for parameter, _ in members) for _, members in groups]
        sizes = [-(-size // self._shards) * self._shards for size in sizes]
        dtypes = [kind.dtype for kind, _ in groups]
        nothing: list[Tensor | None] = [None] * len(groups)
        total = sum(_bytes(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True))
        gradients = values = nothing
        if self._gradients is not None and total:
            segment = self._gradients.allocate(total)
            gradients = _deal(segment.of(self._gradients.rank), sizes, dtypes)
        if self._values is not None and total:
            values = _deal(self._values.allocate(-(-total // self._shards)).flat, sizes, dtypes)
        return [Rooms(*pair) for pair in zip(gradients, values, strict=True)]

    def end_reading(self) -> None:
        """After this rank's last pass of a step; `await_readers` waits for all others to be there."""
        if self._values is not None:
            self._readers = self._values.barrier()

    def await_readers(self) -> None:
        """Before this rank writes its values."""
        if self._readers is not None:
            self._readers.wait()
            self._readers = None

    def end_writing(self) -> None:
        """After this rank has written its values: wait until all have."""
        if self._values is not None:
            self._values.barrier().wait()


def _deal(memory: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Consecutive parts of some bytes as elements."""
    dealt: list[Tensor | None] = []
    at = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        dealt.append(memory.narrow(0, at, size * dtype.itemsize).view(dtype))
        at += _bytes(size, dtype)
    return dealt


def _bytes(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _ALIGNED) * _ALIGNED
