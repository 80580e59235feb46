"""Among whom is measured: partitions of the ranks into groups that all measure at the same time; free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.jobs.collectives.terms import node_traffic
from dthpc.parallel.layout import Layout

_ENOUGH_SAMPLES = 1 << 30
"""A global batch that leaves no rank without work."""


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
        raise nobody(left_out, wanted, len(places))
    return found, left_out


def check_groups(config: Any) -> list[UserError]:
    """What the fewest nodes that the job may get leave nobody to measure; for the login node.

    Args:
        config: the whole configuration, whose layout fits the ranks.
    """
    shape = _fewest(config.cluster)
    if shape is None:
        return []
    nodes, tasks = shape
    ranks, wanted = nodes * tasks, config.job.get("groups")
    wanted = None if not wanted or "auto" in wanted else list(wanted)
    if wanted is None:
        return [nobody([], None, ranks)] if ranks == 1 else []
    layout = layout_of(config, ranks)
    sizes = {"world": ranks, "node": tasks, "cross": nodes, **{axis: layout.degree(axis) for axis in layout.order}}
    lone = [why for name in dict.fromkeys(wanted) if (why := _lone(name, sizes.get(name, 2)))]
    return [nobody(lone, wanted, ranks)] if lone else []


def layout_of(config: Any, ranks: int) -> Layout:
    """The mesh whose axes are measured; nothing is trained, so neither model nor batch has to fit it.

    Raises:
        UserError: the degrees do not fit the ranks.
    """
    return Layout.resolve(degrees_alone(config), ranks)


def degrees_alone(config: Any) -> Any:
    """The configuration without what the layout of a training has to fit."""
    return OmegaConf.create(
        {
            "parallel": config.parallel,
            "cluster": config.cluster,
            "train": {"global_batch": _ENOUGH_SAMPLES, "micro_batch": None},
        }
    )


def nobody(why: Sequence[str], wanted: Sequence[str] | None, ranks: int) -> UserError:
    """What is told where a group that is to be measured is one rank alone.

    Args:
        why: about the groups.
        wanted: `job.groups`; None: they were not named.
        ranks: in all.
    """
    alone = ranks < 2
    more = (
        "cluster.tasks_per_node=2, or more nodes"
        if alone
        else "a layout with that axis, more nodes, or 'job.groups=[auto]'"
    )
    return UserError(
        "one rank alone has nobody to talk to" if alone else "; ".join(why),
        key="job.groups" if wanted is not None else "cluster.tasks_per_node",
        value=f"[{','.join(wanted)}]" if wanted is not None else ranks,
        instead=more,
    )


def _fewest(cluster: Any) -> tuple[int, int] | None:
    """Fewest nodes, and the ranks of each; None where they make no sense, which is told elsewhere."""
    try:
        nodes = min(int(end) for end in str(cluster.nodes).split("-", 1))
    except ValueError:
        return None
    return (nodes, int(cluster.tasks_per_node)) if min(nodes, int(cluster.tasks_per_node)) > 0 else None


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
    return _lone(name, len(groups[0]))


def _lone(name: str, size: int) -> str | None:
    return f"the groups of {name} have one rank each" if size < 2 else None
