"""Where a bucket's storages lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rooms:
    """Memory that other ranks see; None: the storage is in memory of the rank's own."""

    gradients: Tensor | None = None
    """Full gradients, `[size]`."""

    values: Tensor | None = None
    """Whole values, `[size]`, the same on all ranks that shard them."""


NOWHERE = Rooms()
