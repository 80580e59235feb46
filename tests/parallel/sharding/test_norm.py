from __future__ import annotations

import math

import pytest
import torch

from dthpc.parallel.sharding.norm import ROW, sum_of_squares
from tests.parallel.sharding import tasks
from tests.ranks import pool


@pytest.mark.parametrize("count", [0, 1, ROW - 1, ROW, 3 * ROW + 5, 3_000_000])
def test_a_sum_of_squares_is_right_to_seven_digits(count: int) -> None:
    flat = torch.rand(count) + 0.5
    exact = flat.double().square().sum().item()
    assert abs(sum_of_squares(flat).item() - exact) <= 3e-7 * exact


@pytest.mark.parametrize("place", [0, ROW + 1, 2 * ROW])
def test_an_element_that_is_not_finite_shows(place: int) -> None:
    for wrong in (math.inf, -math.inf, math.nan):
        flat = torch.ones(2 * ROW + 1)
        flat[place] = wrong
        assert not math.isfinite(sum_of_squares(flat).item())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_reaches_the_norm_of_all(zero: int) -> None:
    assert not any(math.isfinite(norm) for norm in pool().run(2, tasks.overflow, zero))
