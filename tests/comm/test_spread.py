from __future__ import annotations

import pytest

from dthpc.comm.spread import split_by_node, why_one_level


def test_levels_are_split_by_node_whatever_the_order_of_ranks() -> None:
    assert split_by_node(["a", "a", "b", "b"]) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert split_by_node(["a", "b", "b", "a"]) == ([[0, 3], [1, 2]], [[0, 1], [3, 2]])


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"], ["a", "a", "b"], ["a"], []])
def test_one_node_one_rank_a_node_or_uneven_nodes_have_no_levels(hosts: list[str]) -> None:
    assert split_by_node(hosts) is None


def test_why_there_is_one_level_alone() -> None:
    assert why_one_level(["a", "a"]) == "they are on one node"
    assert "one rank each" in why_one_level(["a", "b"])
