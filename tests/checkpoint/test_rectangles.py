from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dthpc.checkpoint.rectangles import Rectangle, cut, rectangles


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


def values(array: np.ndarray, box: Rectangle) -> list[int]:
    """The elements of a box, in row-major order."""
    window = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
    return array[window].flatten().tolist()


@given(ranges())
def test_they_are_the_range_in_its_order_each_element_once(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    array = np.arange(math.prod(shape)).reshape(shape)
    found = rectangles(shape, start, stop)
    assert [value for box in found for value in values(array, box)] == list(range(start, stop))
    assert [box.start for box in found] == [sum(box.volume for box in found[:i]) for i in range(len(found))]


@given(ranges())
def test_there_are_few(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(rectangles(shape, start, stop)) <= 2 * max(len(shape) - 1, 0) + 1


@given(ranges(), st.integers(1, 30))
def test_cutting_keeps_elements_and_order_and_stays_below_the_limit(
    case: tuple[tuple[int, ...], int, int], limit: int
) -> None:
    shape, start, stop = case
    array = np.arange(math.prod(shape)).reshape(shape)
    for box in rectangles(shape, start, stop):
        parts = cut(box, limit)
        assert [value for part in parts for value in values(array, part)] == values(array, box)
        assert all(1 <= part.volume <= limit for part in parts)
        assert all(values(array, part)[0] == start + part.start for part in parts)


def test_a_range_that_breaks_rows_at_both_ends_needs_as_many_as_the_bound_says() -> None:
    assert rectangles((4, 3, 5), 6, 53) == [
        Rectangle((0, 1, 1), (1, 1, 4), 0),
        Rectangle((0, 2, 0), (1, 1, 5), 4),
        Rectangle((1, 0, 0), (2, 3, 5), 9),
        Rectangle((3, 0, 0), (1, 1, 5), 39),
        Rectangle((3, 1, 0), (1, 1, 3), 44),
    ]


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((), 0, 1, [Rectangle((), (), 0)]),
        ((), 0, 0, []),
        ((0, 3), 0, 0, []),
        ((3, 0), 0, 0, []),
        ((7,), 2, 5, [Rectangle((2,), (3,), 0)]),
        ((2, 6), 0, 12, [Rectangle((0, 0), (2, 6), 0)]),
    ],
)
def test_edges(shape: tuple[int, ...], start: int, stop: int, expected: list[Rectangle]) -> None:
    assert rectangles(shape, start, stop) == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_array_is_an_error(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within an array"):
        rectangles((2, 3), start, stop)
