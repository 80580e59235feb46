"""Dealing cores to ranks: equal shares of the cores nearest to each, along L3 domains, without overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from dthpc.placement.plan.cores import CoreSeat, Seats, distances_from, nearest
from dthpc.placement.plan.places import Unit
from dthpc.placement.topology import Gpu, Topology

Home = tuple[CoreSeat, ...]
"""The cores nearest to what a rank uses."""


@dataclass
class Share:
    """The cores of one rank while they are dealt."""

    rank: int
    home: Home
    node: int | None
    """Memory node that its home is in, for what is borrowed elsewhere."""

    why: str
    cores: list[CoreSeat] = field(default_factory=list)
    shared: int = 0
    """Ranks on its one core, where there are more ranks than cores; else 0."""


def deal_cores(topology: Topology, seats: Seats, units: Sequence[tuple[Unit, ...]], cap: int | None) -> list[Share]:
    """The cores of each local rank.

    Args:
        topology: of the node.
        seats: the cores that may be used.
        units: GPUs of each rank.
        cap: most cores of a rank, or `None`. Ranks whose home holds fewer get the nearest that nobody has.
    """
    shares = _at_home(topology, seats, units)
    taken: set[CoreSeat] = set()
    homes: dict[Home, list[Share]] = {}
    for share in sorted(shares, key=lambda share: (_place(units[share.rank]), share.rank)):
        homes.setdefault(share.home, []).append(share)
    for home in sorted(homes, key=len):
        overlaps = any(other != home and set(other) & set(home) for other in homes)
        fair = max(1, len(seats.cores) // len(shares)) if overlaps else None
        most = min((limit for limit in (cap, fair) if limit is not None), default=None)
        free = [core for core in home if core not in taken]
        for share, cores in zip(homes[home], split(free, len(homes[home]), most), strict=True):
            share.cores = cores
            taken.update(cores)
    _borrow(topology, seats, shares, taken, cap)
    return shares


def split(cores: Sequence[CoreSeat], count: int, cap: int | None = None) -> list[list[CoreSeat]]:
    """Equal shares of cores in their order: whole L3 domains where they come out even, else the same number of cores.

    What can't be dealt evenly is left over. Cores of the slower kind are dealt by themselves.
    """
    kinds = [[core for core in cores if core.slow == slow] for slow in (False, True)]
    dealt = [_split(kind, count, cap) for kind in kinds]
    return [(fast + slow)[:cap] for fast, slow in zip(*dealt, strict=True)]


def _split(cores: Sequence[CoreSeat], count: int, cap: int | None) -> list[list[CoreSeat]]:
    domains: dict[tuple[int | None, int], list[CoreSeat]] = {}
    for core in cores:
        domains.setdefault((core.numa, core.cache), []).append(core)
    groups = list(domains.values())
    if groups and len(groups) % count == 0:
        each = len(groups) // count
        shares = [list(chain(*groups[i * each : (i + 1) * each])) for i in range(count)]
    elif groups and count % len(groups) == 0:
        shares = [share for group in groups for share in _even(group, count // len(groups), cap)]
    else:
        return _even(cores, count, cap)
    # Domains may be of different size, by what is allowed in each.
    if 2 * min(map(len, shares)) < max(map(len, shares)):
        return _even(cores, count, cap)
    return [share[:cap] for share in shares]


def _even(cores: Sequence[CoreSeat], count: int, cap: int | None) -> list[list[CoreSeat]]:
    size = len(cores) // count
    if size == 0:
        return [[core] for core in cores] + [[] for _ in range(count - len(cores))]
    size = size if cap is None else min(size, cap)
    return [list(cores[i * size : (i + 1) * size]) for i in range(count)]


def _place(units: Sequence[Unit]) -> tuple[int, str, int]:
    return units[0].place if units else (0, "", 0)


def _at_home(topology: Topology, seats: Seats, units: Sequence[tuple[Unit, ...]]) -> list[Share]:
    shares = []
    lost = []
    for rank, own in enumerate(units):
        found = _home_of(topology, seats, own[0].gpu) if own else None
        if found is None:
            lost.append(rank)
        else:
            shares.append(Share(rank, *found))
    shares += _by_memory_node(seats, lost, bool(units[lost[0]]) if lost else False)
    return sorted(shares, key=lambda share: share.rank)


def _home_of(topology: Topology, seats: Seats, gpu: Gpu) -> tuple[Home, int | None, str] | None:
    """The usable cores nearest to a GPU with their memory node and the reason; `None` where nobody tells."""
    cpus = gpu.cpus
    if not cpus and gpu.numa:
        cpus = frozenset().union(*(node.cpus or () for node in topology.numa or () if node.index in gpu.numa))
    node = gpu.numa[0] if gpu.numa else None
    where = f"memory node {node}" if node is not None else "its CPU affinity"
    if not cpus and (node is None or all(core.numa is None for core in seats.cores)):
        return None
    home = tuple(core for core in seats.cores if (cpus or frozenset()) & set(core.threads))
    if home:
        return home, home[0].numa if node is None else node, f"cores nearest to {gpu.key} ({where})"
    if node is None and cpus:
        node = topology.numa_of_cpu(min(cpus))
    next_node = nearest(distances_from(topology, node), seats.cores).numa
    home = tuple(core for core in seats.cores if core.numa == next_node)
    why = f"the cores nearest to {gpu.key} ({where}) may not be used here; next nearest: {_nodes([next_node])}"
    return home, next_node, why


def _by_memory_node(seats: Seats, ranks: Sequence[int], with_gpu: bool) -> list[Share]:
    """Homes of ranks that nothing draws anywhere: neighbouring ranks in one memory node, as many as its cores carry."""
    if not ranks:
        return []
    groups: dict[int | None, list[CoreSeat]] = {}
    for core in seats.cores:
        groups.setdefault(core.numa, []).append(core)
    nodes = list(groups)
    prefix = "where its GPU is near is not told; " if with_gpu else ""
    if len(ranks) < len(nodes):
        spans = [nodes[i * len(nodes) // len(ranks) : (i + 1) * len(nodes) // len(ranks)] for i in range(len(ranks))]
        return [
            Share(rank, tuple(core for node in span for core in groups[node]), span[0], f"{prefix}{_nodes(span)}")
            for rank, span in zip(ranks, spans, strict=True)
        ]
    carried = dict.fromkeys(nodes, 0)
    for _ in ranks:
        roomiest = max(nodes, key=lambda node: (len(groups[node]) / (carried[node] + 1), -nodes.index(node)))
        carried[roomiest] += 1
    dealt = [node for node in nodes for _ in range(carried[node])]
    return [
        Share(rank, tuple(groups[node]), node, f"{prefix}share of {_nodes([node])}")
        for rank, node in zip(ranks, dealt, strict=True)
    ]


def _nodes(nodes: Sequence[int | None]) -> str:
    if nodes == [None]:
        return "the machine (no memory node is told)"
    if len(nodes) == 1:
        return f"memory node {nodes[0]}"
    return f"memory nodes {', '.join(map(str, nodes))}"


def _borrow(topology: Topology, seats: Seats, shares: Sequence[Share], taken: set[CoreSeat], cap: int | None) -> None:
    """Give ranks without a core, and those below what was asked, the nearest cores that nobody has."""
    free = [core for core in seats.cores if core not in taken]
    away = {share.node: distances_from(topology, share.node) for share in shares}
    for had in range(cap or 1):
        for share in shares:
            if free and len(share.cores) == had:
                core = nearest(away[share.node], free)
                free.remove(core)
                share.cores.append(core)
                if core.numa != share.node and "; more from" not in share.why:
                    share.why += f"; more from {_nodes([core.numa])}"
    _level(shares)
    users = Counter(core for share in shares for core in share.cores)
    for share in shares:
        share.shared = users[share.cores[0]] if users[share.cores[0]] > 1 else 0


def _level(shares: Sequence[Share]) -> None:
    """Give ranks that still have no core one of whoever has most; where all have one, they share."""
    rich = [share for share in shares if len(share.cores) > 1]
    for number, share in enumerate([share for share in shares if not share.cores]):
        if rich:
            richest = max(rich, key=lambda other: (len(other.cores), -other.rank))
            share.cores = [richest.cores.pop()]
            share.why += f"; all taken, one is given up by rank {richest.rank}"
            rich = [share for share in rich if len(share.cores) > 1]
        else:
            share.cores = [share.home[number % len(share.home)]]
