from __future__ import annotations

from dataclasses import replace

import pytest

from dthpc.errors import UserError
from dthpc.placement.plan.nodes import decide_nodes, order_by_switch
from dthpc.placement.plan.wish import Wish
from tests.placement import nodes


def test_nodes_alike_are_planned_once() -> None:
    one, other = nodes.polaris(), nodes.perlmutter()
    listed = [(f"n{i}", replace(one if i % 3 else other, host=f"n{i}")) for i in range(9)]
    plan = decide_nodes(listed, Wish(4))
    assert len(plan.kinds) == 2
    assert plan.nodes[1][1] is plan.nodes[2][1]
    rows = list(plan.rows())
    assert [(rank, node, place.local_rank) for rank, node, place in rows[4:6]] == [(4, "n1", 0), (5, "n1", 1)]
    told = plan.to_json()
    assert [node["kind"] for node in told["nodes"]] == [0, 1, 1] * 3
    assert len(told["kinds"]) == 2


def test_thousands_of_nodes_cost_what_their_kinds_cost() -> None:
    kinds = [nodes.dgx_a100(), nodes.mi250x()]
    listed = [(f"n{i}", replace(kinds[i % 2], host=f"n{i}")) for i in range(4096)]
    plan = decide_nodes(listed, Wish(8))
    assert len(plan.kinds) == 2
    assert sum(1 for _ in plan.rows()) == 8 * 4096


def test_a_node_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match=r"node n2: 4 GPUs are visible"):
        decide_nodes([("n1", nodes.dgx_a100()), ("n2", nodes.polaris())], Wish(8, gpus=8))


def test_nodes_under_one_switch_stand_together() -> None:
    above = {"n1": ["s1"], "n3": ["s1"], "n5": ["s1"], "n2": ["s2"], "n4": ["s2"]}
    assert order_by_switch(["n4", "n9", "n3", "n2", "n1"], above) == ["n4", "n2", "n3", "n1", "n9"]
    assert order_by_switch(["b", "a"], {}) == ["b", "a"]


def test_switches_that_share_the_one_above_stand_together() -> None:
    above = {"a1": ["top", "p1", "l1"], "a2": ["top", "p2", "l2"], "a3": ["top", "p1", "l3"], "a4": ["top", "p2", "l2"]}
    assert order_by_switch(["a1", "a2", "a3", "a4"], above) == ["a1", "a3", "a2", "a4"]
