"""What one rank holds of a tensor that all ranks share, in the coordinates of the whole one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.rectangles import Rectangle, cut, rectangles


@dataclass(frozen=True)
class Share:
    """A flat range of a rectangular part of a whole tensor.

    Layouts cut a parameter twice: tensor parallelism deals out parts, ZeRO flat ranges of them. Without either a share
    is the whole. The names of its fields are those of `dthpc.parallel.parts`, which this room does not import.
    """

    name: str
    """Of the whole tensor: global, the same in every layout."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    offsets: tuple[int, ...]
    """Where the part begins in the whole, for each dimension."""

    local_shape: tuple[int, ...]
    """Shape of the part."""

    start: int
    """First element, counted in the flattened part."""

    stop: int
    """After the last element."""

    tensor: torch.Tensor
    """The `stop - start` values, on any device: contiguous and of any shape, or of the part's shape."""

    counts: bool = True
    """Whether this copy is written. Equal shares that several ranks count are written once."""

    @property
    def numel(self) -> int:
        """Elements of the share."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.local_shape == self.shape and self.numel == math.prod(self.shape)

    @property
    def record(self) -> TensorRecord:
        """Shape and type of the whole tensor."""
        return TensorRecord(self.shape, str(self.tensor.dtype))

    def boxes(self, limit: int) -> list[Rectangle]:
        """The share as rectangles of at most `limit` elements, in the coordinates of the part."""
        return [part for box in rectangles(self.local_shape, self.start, self.stop) for part in cut(box, limit)]

    def within(self, box: Rectangle) -> torch.Tensor:
        """The values of a rectangle of the share, sharing its memory."""
        values = self.tensor.detach()
        if values.shape != self.local_shape:
            return values.view(-1).narrow(0, box.start, box.volume).view(box.sizes)
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            values = values.narrow(dim, offset, size)
        return values

    def holding(self, name: str, tensor: torch.Tensor) -> Share:
        """Other values, under another name, cut as these are."""
        return replace(self, name=name, tensor=tensor)


def whole(name: str, tensor: torch.Tensor, counts: bool = True) -> Share:
    """A tensor that this rank holds all of."""
    shape = tuple(tensor.shape)
    return Share(name, shape, (0,) * len(shape), shape, 0, math.prod(shape), tensor, counts)
