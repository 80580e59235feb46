"""Placement over many nodes: alike nodes are planned once, and ranks that talk sit under the same switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dthpc.errors import UserError
from dthpc.placement.decide import decide
from dthpc.placement.plan.places import NodePlan, RankPlace
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Topology


@dataclass(frozen=True)
class Plan:
    """The places of all ranks of a run."""

    nodes: tuple[tuple[str, NodePlan], ...]
    """Name and plan of each node, in the order of ranks."""

    @property
    def kinds(self) -> list[NodePlan]:
        """Plans that differ, each once."""
        found: dict[int, NodePlan] = {id(plan): plan for _, plan in self.nodes}
        return list(found.values())

    def rows(self) -> Iterator[tuple[int, str, RankPlace]]:
        """Rank, node and place of each rank."""
        rank = 0
        for name, plan in self.nodes:
            for place in plan.places:
                yield rank, name, place
                rank += 1

    def to_json(self) -> dict[str, Any]:
        """Each kind of node once, and which nodes are of it."""
        kinds = self.kinds
        place = {id(plan): number for number, plan in enumerate(kinds)}
        return {
            "nodes": [{"name": name, "kind": place[id(plan)]} for name, plan in self.nodes],
            "kinds": [plan.to_json() for plan in kinds],
        }


def decide_nodes(nodes: Sequence[tuple[str, Topology]], wish: Wish) -> Plan:
    """Place the ranks of all nodes, as many on each.

    Args:
        nodes: name and topology of each node, in the order of ranks.
        wish: what the ranks of each node need.

    Raises:
        UserError: the wish does not fit one of the nodes; the message names it.
    """
    by_object: dict[int, NodePlan] = {}
    kinds: list[tuple[Topology, NodePlan]] = []
    planned = []
    for name, topology in nodes:
        plan = by_object.get(id(topology))
        if plan is None:
            plan = by_object[id(topology)] = _plan_of_kind(name if len(nodes) > 1 else None, topology, wish, kinds)
        planned.append((name, plan))
    return Plan(tuple(planned))


def _plan_of_kind(name: str | None, topology: Topology, wish: Wish, kinds: list[tuple[Topology, NodePlan]]) -> NodePlan:
    # Where it was read says nothing of what the node is.
    bare = replace(topology, host=None, sources=(), notes=(), conflicts=())
    for known, plan in kinds:
        if known == bare:
            return plan
    try:
        plan = decide(topology, wish)
    except UserError as error:
        if name is None:
            raise
        raise UserError(f"node {name}: {error.why}", key=error.key, value=error.value, instead=error.instead) from error
    kinds.append((bare, plan))
    return plan


def order_by_switch(nodes: Sequence[str], above: Mapping[str, Sequence[str]]) -> list[str]:
    """Nodes in an order of ranks that keeps those under one switch together, otherwise in the order given.

    Neighbouring ranks talk most, so that nodes of one leaf come first, then those that share the switch above it.

    Args:
        nodes: names of the nodes.
        above: for each node the switches above it, from the top of the network to its leaf; nodes without come last.
    """
    first: dict[tuple[str, ...], int] = {}
    for place, node in enumerate(nodes):
        for prefix in _prefixes(above.get(node, ())):
            first.setdefault(prefix, place)
    ends = len(nodes)
    key = {
        node: (*(first[prefix] for prefix in _prefixes(above.get(node, ()))), *([] if above.get(node) else [ends]))
        for node in nodes
    }
    return sorted(nodes, key=key.__getitem__)


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(path[:length]) for length in range(1, len(path) + 1)]
