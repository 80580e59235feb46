"""How a group's ranks are spread over nodes, and whether they can reduce in two levels; free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from dthpc.errors import UserError


def split_by_node(hosts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]] | None:
    """The groups of the two levels.

    Args:
        hosts: for each rank of a group, what tells its node from others.

    Returns:
        Positions in the group: of each node's ranks, and of the ranks that have the same place in their nodes. None
        where there is one node, one rank a node, or nodes have different numbers of ranks.
    """
    nodes: dict[str, list[int]] = {}
    for position, host in enumerate(hosts):
        nodes.setdefault(host, []).append(position)
    inside = list(nodes.values())
    sizes = {len(ranks) for ranks in inside}
    if len(inside) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def why_one_level(hosts: Sequence[str]) -> str:
    """Why `split_by_node` gives None for these ranks."""
    alone = len(set(hosts)) == 1
    return "they are on one node" if alone else "nodes have one rank each, or different numbers of them"


def refusal(why: str) -> UserError:
    """What is told where `comm.hierarchical=true` asks for what the spread of the replicas does not allow."""
    return UserError(
        f"the replicas cannot sum in their nodes first: {why}",
        key="comm.hierarchical",
        value="true",
        instead="several nodes with as many replicas on each, or comm.hierarchical=auto",
    )
