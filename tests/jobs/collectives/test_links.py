from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dthpc.jobs.collectives.links import Slow, find_slow


def matrix(members: int, rate: Callable[[int, int], float], seed: int = 0) -> dict[tuple[int, int], float]:
    """Bandwidths with 3 % of noise."""
    noise = random.Random(seed)
    return {(a, b): rate(a, b) * noise.gauss(1, 0.03) for a in range(members) for b in range(members) if a != b}


def names(found: list[Slow]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(each.kind, each.members, each.direction) for each in found]


@pytest.mark.parametrize("members", [0, 1, 2, 3, 4, 7, 32])
@pytest.mark.parametrize("seed", range(5))
def test_where_all_are_alike_nothing_is_slow(members: int, seed: int) -> None:
    assert find_slow(members, matrix(members, lambda a, b: 10, seed), 0.8) == []


@pytest.mark.parametrize("members", [3, 4, 7, 32])
@pytest.mark.parametrize("factor", [0.1, 0.6])
def test_a_node_whose_every_link_is_slow_is_named_once(members: int, factor: float) -> None:
    found = find_slow(members, matrix(members, lambda a, b: 10 * factor if 1 in (a, b) else 10), 0.8)
    assert names(found) == [("node", (1,), "both")]
    assert found[0].ratio == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("members", [3, 4, 7])
def test_a_node_may_be_slow_in_one_direction(members: int) -> None:
    assert names(find_slow(members, matrix(members, lambda a, b: 1 if a == 2 else 10), 0.8)) == [
        ("node", (2,), "sends")
    ]
    found = find_slow(members, matrix(members, lambda a, b: 1 if b == 0 else 10), 0.8)
    assert names(found) == [("node", (0,), "receives")]


@pytest.mark.parametrize("members", [3, 4, 7, 32])
def test_a_single_link_between_good_nodes_is_a_link(members: int) -> None:
    both = find_slow(members, matrix(members, lambda a, b: 2 if {a, b} == {0, 2} else 10), 0.8)
    assert names(both) == [("link", (0, 2), "both")]
    one = find_slow(members, matrix(members, lambda a, b: 2 if (a, b) == (2, 0) else 10), 0.8)
    assert names(one) == [("link", (2, 0), "one")]


def test_a_slow_node_and_a_slow_link_are_told_apart() -> None:
    found = find_slow(6, matrix(6, lambda a, b: 1 if 5 in (a, b) else 2 if {a, b} == {0, 3} else 10), 0.8)
    assert names(found) == [("node", (5,), "both"), ("link", (0, 3), "both")]


def test_two_slow_nodes_are_both_named_the_slower_one_first() -> None:
    found = find_slow(8, matrix(8, lambda a, b: min(1 if 4 in (a, b) else 10, 3 if 1 in (a, b) else 10)), 0.8)
    assert names(found) == [("node", (4,), "both"), ("node", (1,), "both")]


def test_of_two_nodes_only_a_direction_can_be_named() -> None:
    assert names(find_slow(2, {(0, 1): 1.0, (1, 0): 10.0}, 0.8)) == [("link", (0, 1), "one")]
    assert find_slow(2, {(0, 1): 7.0, (1, 0): 10.0}, 0.8) == []
