"""A flat range of an array is a union of few rectangles, and files hold rectangles. Pure arithmetic, free of torch.

In row-major order a range [start, stop) of an N-dimensional array is a broken first row, whole rows, and a broken last
row. A broken row that begins or ends with its array's edge breaks into at most N-1 rectangles one dimension down, so a
range is at most 2(N-1)+1 of them. A rectangle of such a range is itself contiguous: it is a slice of the flat values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """An axis-aligned box of an array, contiguous among the flat values that it was cut from."""

    offsets: tuple[int, ...]
    """Its first index in each dimension of the array."""

    sizes: tuple[int, ...]
    """Its length in each dimension."""

    start: int
    """Where its values begin, counted from the beginning of the range."""

    @property
    def volume(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """The rectangles that make up a flat range of an array, in the order of its values.

    Args:
        shape: of the array; `()` for a scalar, which has one element.
        start: first element of the range, counted in the flattened array.
        stop: after its last one.

    Returns:
        At most 2(N-1)+1 rectangles of N dimensions, which cover each element once; none for an empty range.

    Raises:
        ValueError: the range is not within the array.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"the range {start}:{stop} is not within an array of shape {shape}")
    found = []
    at = 0
    for offsets, sizes in _boxes(shape, start, stop) if start < stop else ():
        found.append(Rectangle(offsets, sizes, at))
        at += math.prod(sizes)
    return found


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if first == last:
        yield from _within_row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _within_row(shape, first, start % row, row)
        first += 1
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if stop % row:
        yield from _within_row(shape, last, 0, stop % row)


def _within_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


def cut(whole: Rectangle, limit: int) -> list[Rectangle]:
    """Cut a rectangle into ones of at most `limit` elements each, in the order of their values.

    It is cut along its first dimension longer than 1, so that the parts are contiguous too.
    """
    if whole.volume <= limit:
        return [whole]
    dim = next(dim for dim, size in enumerate(whole.sizes) if size > 1)
    row = whole.volume // whole.sizes[dim]
    rows = max(1, limit // row)
    parts = []
    for first in range(0, whole.sizes[dim], rows):
        count = min(rows, whole.sizes[dim] - first)
        offsets = (*whole.offsets[:dim], whole.offsets[dim] + first, *whole.offsets[dim + 1 :])
        sizes = (*whole.sizes[:dim], count, *whole.sizes[dim + 1 :])
        parts += cut(Rectangle(offsets, sizes, whole.start + first * row), limit)
    return parts
