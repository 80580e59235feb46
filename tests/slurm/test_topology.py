"""The network as Slurm tells it."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.topology import leaves_of, parse_topology, paths_of

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1,3]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[2,4]
SwitchName=root Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""


def test_a_tree() -> None:
    switches = parse_topology(TREE)
    assert [switch.name for switch in switches] == ["leaf1", "leaf2", "root"]
    assert paths_of(switches)["n3"] == ("root", "leaf1")
    assert [switch.name for switch in leaves_of(switches)] == ["leaf1", "leaf2"]


def test_the_order_of_lines_and_what_stands_around_them_do_not_matter() -> None:
    lines = ["$ scontrol show topology", *reversed(TREE.splitlines()), "", "\x1b[0m"]
    assert paths_of(parse_topology("\r\n".join(lines))) == paths_of(parse_topology(TREE))


def test_nodes_of_an_upper_switch_are_those_below_where_slurm_leaves_them_out() -> None:
    text = TREE.replace("Nodes=n[1-4] ", "Nodes=(null) ")
    assert paths_of(parse_topology(text))["n4"] == ("root", "leaf2")


def test_blocks_and_blocks_of_blocks() -> None:
    switches = parse_topology(BLOCKS)
    assert paths_of(switches) == {
        "n1": ("b[1-2]", "b1"),
        "n2": ("b[1-2]", "b1"),
        "n3": ("b[1-2]", "b2"),
        "n4": ("b[1-2]", "b2"),
    }
    assert [switch.name for switch in leaves_of(switches)] == ["b1", "b2"]


@pytest.mark.parametrize(
    "text", ["", "No topology information available\n", "slurm_load_topo error: Unable to contact"]
)
def test_a_cluster_without_a_topology(text: str) -> None:
    assert parse_topology(text) == []


def test_a_malformed_list_is_told() -> None:
    with pytest.raises(UserError, match=r"scontrol show topology=n\[1,3: a bracket that is never closed"):
        parse_topology("SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1,3")
