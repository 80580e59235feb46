"""The cores of a node that ranks may use, in the order in which they are dealt: by memory node, L3 domain, number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, format_cpus
from dthpc.placement.topology import Topology


@dataclass(frozen=True)
class CoreSeat:
    """One core that may be used."""

    threads: tuple[int, ...]
    """Its CPUs that may be used, ascending."""

    numa: int | None = None
    """Its memory node."""

    cache: int = 0
    """Its L3 domain, by the lowest CPU of it; cores of one memory node share a domain where nobody tells."""

    slow: bool = False
    """Whether it is one of the slower kind."""


@dataclass(frozen=True)
class Seats:
    """The cores of a node."""

    cores: tuple[CoreSeat, ...]
    reserved: CpuSet
    known: bool = True
    """Whether the topology tells which threads share a core. Where it does not, CPUs that may well do (the halves of a
    list such as `0-15,64-79`) are kept together and all used."""

    notes: tuple[str, ...] = ()

    @property
    def cpus(self) -> CpuSet:
        return frozenset(cpu for core in self.cores for cpu in core.threads)


def usable_cpus(topology: Topology, allowed: CpuSet | None = None) -> CpuSet | None:
    """CPUs that exist and are allowed; `None` where the topology tells of none.

    Raises:
        UserError: `allowed` holds CPUs that do not exist or are not allowed, or nothing is left.
    """
    usable = topology.usable_cpus()
    if usable is None:
        told = [node.cpus for node in topology.numa or () if node.cpus]
        told += [gpu.cpus for gpu in topology.gpus or () if gpu.cpus]
        usable = frozenset().union(*told) if told else None
    if allowed is None or usable is None:
        found = usable if allowed is None else allowed
    elif allowed - usable:
        raise UserError(
            f"CPUs {format_cpus(allowed - usable)} are outside of what may be used here ({format_cpus(usable)})",
            key="allowed CPUs",
            value=format_cpus(allowed),
            instead=f"a mask within {format_cpus(usable)}",
        )
    else:
        found = allowed
    if found is not None and not found:
        raise UserError("no CPU that exists may be used", key="allowed CPUs", instead="a larger CPU mask or allocation")
    return found


def seats_of(topology: Topology, allowed: CpuSet | None, reserved: CpuSet, reserve: str | None) -> Seats | None:
    """The cores that ranks may use; `None` where the topology tells no CPUs.

    Args:
        topology: of the node.
        allowed: CPUs that may be used, where it is not what the topology says.
        reserved: CPUs to leave alone.
        reserve: `l3` or `numa`: leave the first core of each such domain alone too.

    Raises:
        UserError: the mask does not fit the node, or nothing is left.
    """
    usable = usable_cpus(topology, allowed)
    if usable is None:
        return None
    threads, known = _threads(topology, usable)
    caches = {cpu: min(cache.cpus) for cache in topology.caches or () for cpu in cache.cpus}
    slow = {cpu for core in topology.cores or () if core.efficient for cpu in core.cpus}
    numa = _memory_nodes(topology)
    cores = [CoreSeat(cpus, numa.get(cpus[0]), caches.get(cpus[0], -1), cpus[0] in slow) for cpus in threads]
    cores.sort(key=lambda core: (-1 if core.numa is None else core.numa, core.cache, core.threads))
    left = _reserved(cores, reserved, reserve)
    cores = [core for core in cores if core not in left]
    if not cores:
        raise UserError(
            "no core is left for the ranks",
            key="placement.reserve",
            value=format_cpus(reserved) or reserve,
            instead="reserve fewer cores",
        )
    notes = []
    if not known:
        notes.append("Which threads share a core is not told: CPUs that may be threads of one core stay together.")
    if 0 < sum(core.slow for core in cores) < len(cores):
        notes.append(
            f"{sum(core.slow for core in cores)} of {len(cores)} cores are of the slower kind; each rank gets "
            "its share of both."
        )
    return Seats(tuple(cores), frozenset(cpu for core in left for cpu in core.threads), known, tuple(notes))


def _memory_nodes(topology: Topology) -> dict[int, int]:
    """Memory node of each CPU: as told, else that of the GPUs whose affinity names both; none where these disagree."""
    told = {cpu: node.index for node in reversed(topology.numa or ()) for cpu in node.cpus or ()}
    if told:
        return told
    named: dict[int, set[int]] = {}
    for gpu in topology.gpus or ():
        if gpu.cpus and gpu.numa and len(gpu.numa) == 1:
            for cpu in gpu.cpus:
                named.setdefault(cpu, set()).add(gpu.numa[0])
    return {cpu: next(iter(nodes)) for cpu, nodes in named.items() if len(nodes) == 1}


def _reserved(cores: Sequence[CoreSeat], reserved: CpuSet, reserve: str | None) -> list[CoreSeat]:
    """Cores to leave alone: a core whose first thread serves the system is no good for a rank on its second."""
    left = [core for core in cores if reserved & set(core.threads)]
    if reserve is not None:
        firsts: dict[object, CoreSeat] = {}
        for core in cores:
            firsts.setdefault(core.numa if reserve == "numa" else (core.numa, core.cache), core)
        left += [core for core in firsts.values() if core not in left]
    return left


def _threads(topology: Topology, usable: CpuSet) -> tuple[list[tuple[int, ...]], bool]:
    """CPUs by core, and whether the topology tells it."""
    if topology.cores:
        groups = [tuple(sorted(core.cpus & usable)) for core in topology.cores]
        lone = usable.difference(*groups)
        return [group for group in groups if group] + [(cpu,) for cpu in sorted(lone)], True
    told = topology.counts.threads_per_core
    if told == 1:
        return [(cpu,) for cpu in sorted(usable)], True
    groups = []
    for atom in _atoms(topology, usable):
        groups += _columns(atom, told)
    return groups, max(map(len, groups)) == 1


def _atoms(topology: Topology, usable: CpuSet) -> list[CpuSet]:
    """The usable CPUs, parted by which memory nodes and GPUs they are near to."""
    domains = [node.cpus for node in topology.numa or () if node.cpus]
    domains += [gpu.cpus for gpu in topology.gpus or () if gpu.cpus]
    parted: dict[tuple[bool, ...], set[int]] = {}
    for cpu in usable:
        parted.setdefault(tuple(cpu in domain for domain in domains), set()).add(cpu)
    return sorted((frozenset(each) for each in parted.values()), key=min)


def _columns(cpus: CpuSet, rows: int | None) -> list[tuple[int, ...]]:
    """CPUs that may be threads of one core, from the equal runs of a list: 0-3,8-11 gives 0 with 8, 1 with 9, ...

    Linux numbers the first threads of all cores before the second ones on all but a few machines, so that runs of one
    length, two or four of them, may be the threads of the same cores. Kept together, they do no harm where not.
    """
    runs = _runs(sorted(cpus))
    alike = len(runs) in ((rows,) if rows else (2, 4)) and len({len(run) for run in runs}) == 1
    return list(zip(*runs, strict=True)) if alike else [(cpu,) for cpu in sorted(cpus)]


def _runs(cpus: Sequence[int]) -> list[list[int]]:
    """Runs with the smallest step that occurs: 0,2,4,12,14,16 is 0,2,4 and 12,14,16."""
    step = min((b - a for a, b in pairwise(cpus)), default=1)
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu - runs[-1][-1] == step:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return runs


def distances_from(topology: Topology, node: int | None) -> Mapping[int, int]:
    """Distance of each memory node to one, in the firmware's unit; itself first where nothing is told."""
    told = topology.numa_node(node) if node is not None else None
    if told is not None and told.distances:
        return told.distances
    # Without distances, nodes of the same package are nearer than others.
    package = None if told is None else told.package
    return {
        other.index: 10 if other.index == node else 16 if package is not None and other.package == package else 32
        for other in topology.numa or ()
    }


def nearest(away: Mapping[int, int], cores: Iterable[CoreSeat]) -> CoreSeat:
    """The core whose memory node is the nearest by these distances; the first of several."""
    return min(cores, key=lambda core: away.get(-1 if core.numa is None else core.numa, 1 << 16))
