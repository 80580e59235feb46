from __future__ import annotations

import math

import pytest
import torch

from dthpc.parallel.layout import Layout
from tests.parallel.sharding import reduction_tasks
from tests.ranks import pool


@pytest.mark.parametrize("axis", ["pp", "tp"])
@pytest.mark.parametrize(
    ("degrees", "zero"), [({}, 0), ({"replicate": 2}, 0), ({"shard": 2}, 1), ({"shard": 2}, 2), ({"shard": 2}, 3)]
)
def test_copies_on_other_ranks_get_the_sum_and_count_once(axis: str, degrees: dict[str, int], zero: int) -> None:
    degrees = {**degrees, axis: 2}
    size = math.prod(degrees.values())
    options = {"zero": zero, "bucket_bytes": 64}
    expected = reduction_tasks.pipe_reference(Layout(**degrees), size, axis)
    answers = pool().run(size, reduction_tasks.tied_and_partial, degrees, options, axis)
    found = set()
    for pieces, norm, plain in answers:
        assert norm == answers[0][1]
        torch.testing.assert_close(norm, plain, rtol=1e-5, atol=0)
        for key, gradient in pieces.items():
            name, start = key.split(":")
            found.add(name)
            part = expected[name].flatten()[int(start) : int(start) + gradient.numel()]
            torch.testing.assert_close(gradient.flatten(), part, rtol=1e-5, atol=1e-6)
    assert found == set(expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_large_gradients_are_the_sums(size: int, zero: int) -> None:
    expected = [sum(reduction_tasks.broad_gradients(rank)[number] for rank in range(size)) for number in range(3)]
    for pieces in pool().run(size, reduction_tasks.broad, size, zero):
        for number, start, gradient in pieces:
            whole = torch.as_tensor(expected[number]).flatten()
            torch.testing.assert_close(gradient, whole[start : start + gradient.numel()], rtol=1e-5, atol=1e-5)
