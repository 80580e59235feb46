from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.jobs.collectives.groups import partitions, place_ranks
from dthpc.parallel.layout import Layout

TWO_BY_TWO = place_ranks([("x", "a"), ("x", "a"), ("y", "b"), ("y", "b")])


def test_ranks_are_placed_by_what_tells_their_nodes_apart_not_by_name() -> None:
    places = place_ranks([("x", "localhost"), ("y", "localhost"), ("x", "localhost")])
    assert [(place.node, place.local) for place in places] == [(0, 0), (1, 0), (0, 1)]


def test_the_same_division_by_two_names_is_measured_once() -> None:
    found, left_out = partitions(Layout(replicate=2, tp=2), TWO_BY_TWO, None)
    assert {each.name: (each.groups, each.aliases) for each in found} == {
        "world": (((0, 1, 2, 3),), ()),
        "node": (((0, 1), (2, 3)), ("tp",)),
        "cross": (((0, 2), (1, 3)), ("replicate",)),
    }
    assert left_out == []


def test_links_carry_what_all_groups_send_at_once() -> None:
    world, node, cross = partitions(None, TWO_BY_TWO, None)[0]
    assert world.link_load("all_reduce", TWO_BY_TWO) == 1
    assert node.link_load("all_reduce", TWO_BY_TWO) == 0
    assert cross.link_load("all_reduce", TWO_BY_TWO) == 2
    assert [each.nodes(TWO_BY_TWO) for each in (world, node, cross)] == [2, 1, 2]


def test_nodes_with_different_numbers_of_ranks_leave_the_world_alone() -> None:
    found, left_out = partitions(None, place_ranks([("x", "a"), ("x", "a"), ("y", "b")]), None)
    assert [each.name for each in found] == ["world"]
    assert left_out
    assert all("different numbers" in why for why in left_out)


@pytest.mark.parametrize(
    ("hosts", "wanted"), [([("x", "a")], None), ([("x", "a")] * 2, ["cross"]), ([("x", "a")] * 2, ["tp"])]
)
def test_nobody_to_talk_to_is_refused(hosts: list[tuple[str, str]], wanted: list[str] | None) -> None:
    with pytest.raises(UserError, match="rank"):
        partitions(Layout(replicate=len(hosts)), place_ranks(hosts), wanted)
