from __future__ import annotations

import itertools
import random

import pytest

from dthpc.errors import UserError
from dthpc.parallel.pipeline.balance import by_hand, deal, uniform


def stage_costs(costs: list[float], counts: list[int]) -> list[float]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [sum(costs[first:last]) for first, last in itertools.pairwise(ends)]


def every_dealing(layers: int, stages: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [[b - a for a, b in itertools.pairwise([0, *cut, layers])] for cut in cuts]


@pytest.mark.parametrize("seed", range(40))
def test_no_dealing_has_a_cheaper_most_expensive_stage_or_a_more_even_one(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 9)
    stages = draw.randint(1, layers)
    costs = [draw.choice([0.0, 1.0, 2.0, 5.0, 3 * draw.random()]) for _ in range(layers)]
    counts = deal(costs, stages)
    assert len(counts) == stages
    assert min(counts) >= 1
    assert sum(counts) == layers
    every = [stage_costs(costs, other) for other in every_dealing(layers, stages)]
    least = min(max(other) for other in every)
    mine = stage_costs(costs, counts)
    assert max(mine) == pytest.approx(least)
    even = min(sum(cost**2 for cost in other) for other in every if max(other) <= least + 1e-9)
    assert sum(cost**2 for cost in mine) == pytest.approx(even)


def test_equal_layers_are_dealt_evenly_with_the_longer_stages_last() -> None:
    assert deal([1.0] * 10, 4) == uniform(10, 4) == [2, 2, 3, 3]
    assert deal([1.0] * 8, 4) == uniform(8, 4) == [2, 2, 2, 2]
    assert deal([0.0] * 3, 3) == [1, 1, 1]


def test_an_expensive_embedding_and_head_get_fewer_layers_beside_them() -> None:
    assert deal([4, 1, 1, 1, 1, 1, 1, 1, 1, 3], 4) == [1, 3, 4, 2]
    assert deal([1, 1, 1, 1, 1, 100], 3) == [2, 3, 1]


def test_hundreds_of_layers_and_stages() -> None:
    draw = random.Random(0)
    costs = [1 + draw.random() for _ in range(600)]
    for stages in (16, 128, 512):
        mine = stage_costs(costs, deal(costs, stages))
        assert max(mine) <= sum(costs) / stages + max(costs)
    assert deal(costs, 128) == deal(list(costs), 128)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(cost: float) -> None:
    with pytest.raises(UserError, match="layer 1 costs"):
        deal([1.0, cost], 1)


def test_more_stages_than_layers() -> None:
    for refused in (lambda: deal([1.0] * 3, 4), lambda: uniform(3, 4)):
        with pytest.raises(UserError, match=r"parallel.pp: the model has 3 layers to deal, too few for 4"):
            refused()


def test_stages_by_hand() -> None:
    assert by_hand([1, 2, 3], 6, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3, 3], "there are 3 stages, but numbers of layers for 2"),
        ([0, 3, 3], "each stage needs a whole number"),
        ([1.5, 1.5, 3], "each stage needs a whole number"),
        ([True, 2, 3], "each stage needs a whole number"),
        ([2, 2, 3], "add up to 7, but the model has 6"),
    ],
)
def test_stages_by_hand_that_do_not_fit(counts: list[int], message: str) -> None:
    with pytest.raises(UserError, match=rf"{message}.*parallel.stages=\[2, 2, 2\]"):
        by_hand(counts, 6, 3)
