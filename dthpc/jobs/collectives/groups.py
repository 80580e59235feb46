"""Among whom is measured: partitions of the ranks into groups that all measure at the same time; free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dthpc.errors import UserError
from dthpc.jobs.collectives.terms import node_traffic

if TYPE_CHECKING:
    from dthpc.parallel.layout import Layout


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    host: str
    """Name of its node."""

    node: int
    """Number of its node, by first rank."""

    local: int
    """Its number on the node."""


@dataclass(frozen=True)
class Partition:
    """All ranks, divided into groups of equal size."""

    name: str
    """`world`, `node`, `cross`, or an axis."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, in the group's order."""

    aliases: tuple[str, ...] = ()
    """Other names of the same division."""

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return len(self.groups[0])

    @property
    def title(self) -> str:
        """Name and other names."""
        return f"{self.name} ({', '.join(self.aliases)})" if self.aliases else self.name

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group that a rank is in."""
        return next(group for group in self.groups if rank in group)

    def nodes(self, places: Sequence[Place]) -> int:
        """Nodes that a group is on: of the group that is on most."""
        return max(len({places[rank].node for rank in group}) for group in self.groups)

    def link_load(self, operation: str, places: Sequence[Place]) -> float:
        """Bytes over the busiest node's link for each byte of size while all groups work; see `node_traffic`."""
        loads: dict[int, float] = {}
        for group in self.groups:
            nodes = {places[rank].node for rank in group}
            for node in nodes:
                loads[node] = loads.get(node, 0.0) + node_traffic(operation, len(group), len(nodes))
        return max(loads.values())


def place_ranks(hosts: Sequence[tuple[str, str]]) -> list[Place]:
    """Nodes and local numbers of the ranks.

    Args:
        hosts: for each rank, what tells its node from others, and the node's name.
    """
    nodes: dict[str, int] = {}
    counts: dict[int, int] = {}
    places = []
    for identity, name in hosts:
        node = nodes.setdefault(identity, len(nodes))
        places.append(Place(name, node, counts.get(node, 0)))
        counts[node] = counts.get(node, 0) + 1
    return places


def partitions(
    layout: Layout | None, places: Sequence[Place], wanted: Sequence[str] | None
) -> tuple[list[Partition], list[str]]:
    """The divisions to measure in.

    Args:
        layout: the mesh of the ranks; None: it has no axes.
        places: of all ranks.
        wanted: names, as in `CollectivesJob.groups`; None: all that have more than one rank and differ.

    Returns:
        The divisions, those that are the same by two names only once; and why others were left out.

    Raises:
        UserError: none of the wanted ones has more than one rank.
    """
    found: list[Partition] = []
    left_out: list[str] = []
    for name, groups in _all(layout, places).items():
        if wanted is not None and name not in wanted:
            continue
        why = _unfit(name, groups, places)
        if why is not None:
            left_out += [why] if wanted is not None or why.startswith("nodes") else []
            continue
        same = next((at for at, other in enumerate(found) if set(other.groups) == set(groups)), None)
        if same is None:
            found.append(Partition(name, groups))
        else:
            known = found[same]
            found[same] = Partition(known.name, known.groups, (*known.aliases, name))
    if not found:
        raise UserError(
            "; ".join(left_out) or "one rank alone has nobody to talk to",
            key="job.groups" if wanted is not None else "cluster.tasks_per_node",
            value=f"[{','.join(wanted)}]" if wanted is not None else len(places),
            instead="cluster.tasks_per_node or cluster.nodes of at least 2, or job.groups=[world]",
        )
    return found, left_out


def _all(layout: Layout | None, places: Sequence[Place]) -> dict[str, tuple[tuple[int, ...], ...]]:
    ranks = range(len(places))
    by_node: dict[int, list[int]] = {}
    by_local: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        by_node.setdefault(place.node, []).append(rank)
        by_local.setdefault(place.local, []).append(rank)
    named = {
        "world": (tuple(ranks),),
        "node": tuple(map(tuple, by_node.values())),
        "cross": tuple(map(tuple, by_local.values())),
    }
    if layout is not None:
        for axis in layout.order:
            named[axis] = tuple(dict.fromkeys(tuple(layout.ranks_along(rank, axis)) for rank in ranks))
    return named


def _unfit(name: str, groups: tuple[tuple[int, ...], ...], places: Sequence[Place]) -> str | None:
    if len({len(group) for group in groups}) > 1:
        return f"nodes have different numbers of ranks, so that the groups of {name} would differ in size"
    return f"the groups of {name} have one rank each" if len(groups[0]) < 2 else None
