"""Several sources of one node put together, the better one winning where two disagree.

The order of precedence, fact by fact the first that tells it wins: the kernel itself (sysfs); hwloc; the vendors' tools
by bus id, then by number; NCCL's files, which people edit; lscpu and numactl; the tools of RDMA adapters; Slurm, whose
numbers an administrator wrote. What the losers say is kept as a conflict, for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from dthpc.placement.cpuset import CpuSet, format_cpus
from dthpc.placement.read.combine_devices import combine_gpus, combine_nics, filled, rename_links
from dthpc.placement.topology import Conflict, Counts, NumaNode, Topology

ORDER = (
    "sysfs",
    "hwloc",
    "nvml",
    "nvidia-smi -q -x",
    "nvidia-smi csv",
    "amd-smi",
    "rocm-smi",
    "nvidia-smi topo",
    "nvidia-smi -L",
    "nccl topology",
    "lscpu",
    "numactl",
    "ibv_devinfo",
    "ibstat",
    "ibstatus",
    "ibdev2netdev",
    "slurm gres",
    "slurm node",
    "slurmd",
)
"""Kinds of sources, the most trusted first."""

T = TypeVar("T")


def combine(parts: Sequence[Topology]) -> Topology:
    """One topology out of several of the same node, at least one."""
    ranked = sorted(parts, key=_rank)
    if len(ranked) == 1:
        return ranked[0]
    conflicts: list[Conflict] = []
    notes = [note for part in ranked for note in part.notes]
    gpus, gpu_names = combine_gpus(ranked, conflicts, notes)
    nics, nic_names = combine_nics(ranked, conflicts, notes)
    links = rename_links(ranked, [{**a, **b} for a, b in zip(gpu_names, nic_names, strict=True)], conflicts)
    merged = Topology(
        host=_first(part.host for part in ranked),
        existing=_agreed(ranked, "existing", conflicts),
        offline=_first(part.offline for part in ranked),
        allowed=_agreed(ranked, "allowed", conflicts),
        allowed_memory=_first(part.allowed_memory for part in ranked),
        packages=_first(part.packages for part in ranked),
        numa=_numa(ranked, conflicts),
        caches=_first(part.caches for part in ranked),
        cores=_first(part.cores for part in ranked),
        gpus=gpus,
        nics=nics,
        links=links,
        switches=_first(part.switches for part in ranked),
        counts=_counts(ranked),
        complete=all(part.complete for part in ranked),
        sources=tuple(source for part in ranked for source in part.sources),
        conflicts=(*(conflict for part in ranked for conflict in part.conflicts), *conflicts),
        notes=tuple(dict.fromkeys(notes)),
    )
    more = (*_against_counts(merged), *_against_nodes(merged))
    return replace(merged, conflicts=merged.conflicts + more)


def source_of(part: Topology) -> str:
    """The name of a part's source for messages."""
    return part.sources[0].kind if part.sources else "unknown"


def _rank(part: Topology) -> int:
    kind = source_of(part)
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _agreed(ranked: Sequence[Topology], name: str, conflicts: list[Conflict]) -> CpuSet | None:
    """A set of CPUs, the first known; others that differ are conflicts."""
    known = [(source_of(part), getattr(part, name)) for part in ranked if getattr(part, name) is not None]
    if not known:
        return None
    kept_from, kept = known[0]
    for other_from, other in known[1:]:
        if other != kept:
            conflicts.append(Conflict(f"{name} CPUs", format_cpus(kept), kept_from, format_cpus(other), other_from))
    result: CpuSet = kept
    return result


def _numa(ranked: Sequence[Topology], conflicts: list[Conflict]) -> tuple[NumaNode, ...] | None:
    """The memory nodes by number, each fact of each from the first that tells it."""
    found: dict[int, NumaNode] = {}
    said: dict[int, str] = {}
    known = [part for part in ranked if part.numa is not None]
    for part in known:
        for node in part.numa or ():
            earlier = found.get(node.index)
            if earlier is None:
                # A later source may know a node that the first leaves out, such as one of a GPU's memory.
                found[node.index], said[node.index] = node, source_of(part)
                continue
            if node.cpus is not None and earlier.cpus is not None and node.cpus != earlier.cpus:
                what = f"CPUs of memory node {node.index}"
                kept, other = format_cpus(earlier.cpus), format_cpus(node.cpus)
                conflicts.append(Conflict(what, kept, said[node.index], other, source_of(part)))
            found[node.index] = filled(earlier, node)
    return tuple(found[index] for index in sorted(found)) if known else None


def _counts(ranked: Sequence[Topology]) -> Counts:
    merged = Counts()
    for part in ranked:
        merged = filled(merged, part.counts)
    return merged


def _against_counts(merged: Topology) -> Iterable[Conflict]:
    """Numbers that a source counts against what others list."""
    listed = {
        "cpus": len(merged.existing) if merged.existing is not None else None,
        "packages": len(merged.packages) if merged.packages is not None else None,
        "gpus": len(merged.gpus) if merged.gpus is not None else None,
    }
    for name, number in listed.items():
        counted = getattr(merged.counts, name)
        if number is not None and counted is not None and number != counted:
            yield Conflict(f"number of {name}", str(number), "what is listed", str(counted), "what is counted")


def _against_nodes(merged: Topology) -> Iterable[Conflict]:
    """GPUs whose nearest CPUs reach beyond their memory node, as another source lists that."""
    cpus_of = {node.index: node.cpus for node in merged.numa or () if node.cpus}
    everywhere: CpuSet = frozenset().union(*cpus_of.values())
    for gpu in merged.gpus or ():
        near: CpuSet = frozenset().union(*(cpus_of.get(index, frozenset()) for index in gpu.numa or ()))
        beyond = (gpu.cpus or frozenset()) & everywhere - near
        if near and beyond:
            nodes = ", ".join(map(str, gpu.numa or ()))
            listed = f"memory node {nodes} with {format_cpus(near)}"
            yield Conflict(
                f"CPUs nearest to {gpu.key}", format_cpus(gpu.cpus or ()), "its affinity", listed, "its node"
            )
