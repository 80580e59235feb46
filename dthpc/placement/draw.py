"""A node's topology drawn as text: packages, memory nodes, caches, and the devices near to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dthpc.placement.cpuset import CpuSet, format_cpus
from dthpc.placement.plan.units import compute_gpus
from dthpc.placement.topology import Gpu, Nic, NumaNode, Topology


def draw(topology: Topology) -> str:
    """The drawing, some lines; only what is known is in it."""
    lines = [_head(topology)]
    gpus = compute_gpus(topology)
    nics = list(topology.nics or ())
    placed: set[str] = set()
    for node in topology.numa or ():
        near_gpus = [gpu for gpu in gpus if gpu.numa and gpu.numa[0] == node.index]
        near_nics = [nic for nic in nics if nic.numa and nic.numa[0] == node.index]
        if _is_empty(node) and not near_gpus and not near_nics:
            continue
        lines.append(_node(topology, node))
        lines += [f"    {line}" for line in _caches(topology, node.cpus)]
        lines += [f"    {_gpu(gpu)}" for gpu in near_gpus]
        lines += [f"    {_nic(topology, nic, gpus)}" for nic in near_nics]
        placed |= {gpu.key for gpu in near_gpus} | {nic.name for nic in near_nics}
    rest = [_gpu(gpu) for gpu in gpus if gpu.key not in placed]
    rest += [_nic(topology, nic, gpus) for nic in nics if nic.name not in placed]
    if rest:
        lines += ["  memory node not told" if topology.numa else "  devices", *(f"    {line}" for line in rest)]
    lines += [f"  {line}" for line in links_between(topology, gpus)]
    lines += [f"  empty memory nodes: {_empty(topology)}"] if _empty(topology) else []
    return "\n".join(lines)


def links_between(topology: Topology, gpus: Sequence[Gpu]) -> list[str]:
    """How GPUs reach each other: one line where all do alike, else one for each kind of way."""
    pairs: dict[str, list[str]] = {}
    for place, a in enumerate(gpus):
        for b in gpus[place + 1 :]:
            link = topology.link(a.key, b.key)
            word = (link.word if link is not None else None) or topology.level(a, b)
            if word is not None:
                pairs.setdefault(word, []).append(f"{a.key}-{b.key}")
    if len(pairs) == 1 and len(gpus) > 2:
        return [f"all GPUs reach each other by {next(iter(pairs))}"]
    return [f"{word}: {', '.join(found[:12])}{', …' if len(found) > 12 else ''}" for word, found in pairs.items()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _head(topology: Topology) -> str:
    counts = []
    if topology.packages:
        counts.append(_count(len(topology.packages), "package"))
    if topology.cores:
        threads = max(len(core.cpus) for core in topology.cores)
        counts.append(f"{_count(len(topology.cores), 'core')} of {_count(threads, 'thread')}")
    elif topology.existing:
        counts.append(_count(len(topology.existing), "CPU"))
    counts.append(_count(len(compute_gpus(topology)), "GPU"))
    allowed = topology.usable_cpus()
    if allowed is not None and topology.existing is not None and allowed != topology.existing:
        counts.append(f"allowed: CPUs {format_cpus(allowed)}")
    return f"{topology.host or 'node'}: {', '.join(counts)}"


def _node(topology: Topology, node: NumaNode) -> str:
    words = [f"  memory node {node.index}"]
    if node.package is not None and len(topology.packages or ()) > 1:
        words.append(f"package {node.package}")
    if node.memory_bytes:
        words.append(f"{node.memory_bytes / 2**30:.0f} GiB")
    owner = next((gpu.key for gpu in topology.gpus or () if gpu.memory_numa == node.index), None)
    if owner is not None:
        words.append(f"memory of {owner}")
    elif node.cpus is not None:
        words.append(f"CPUs {format_cpus(node.cpus)}" if node.cpus else "no CPUs")
    return "  ".join(words)


def _caches(topology: Topology, cpus: CpuSet | None) -> Iterator[str]:
    inside = [cache for cache in topology.caches or () if cpus and cache.cpus <= cpus]
    if len(inside) > 1:
        for cache in inside:
            size = f"  {cache.size_bytes / 2**20:.0f} MiB" if cache.size_bytes else ""
            yield f"L3  CPUs {format_cpus(cache.cpus)}{size}"


def _gpu(gpu: Gpu) -> str:
    parts = f"{len(gpu.parts)} {gpu.parts[0].kind}s" if gpu.parts else None
    return "  ".join(
        word for word in (gpu.key, gpu.bus_id if gpu.bus_id != gpu.key else None, gpu.model, parts) if word
    )


def _nic(topology: Topology, nic: Nic, gpus: Sequence[Gpu]) -> str:
    words = [nic.name, nic.kind or ""]
    if nic.up is not None:
        words.append("up" if nic.up else "DOWN")
    rate = max((port.rate_gbps or 0.0 for port in nic.ports or () if port.up is not False), default=0.0)
    if rate and nic.up is not False:
        words.append(f"{rate:g} Gbit/s")
    near = {gpu.key: topology.level(gpu, nic) for gpu in gpus}
    shown = [f"{level} to {key}" for key, level in near.items() if level not in (None, "SYS", "NODE")]
    return "  ".join(word for word in (*words, ", ".join(shown)) if word)


def _is_empty(node: NumaNode) -> bool:
    return node.cpus == frozenset() and not node.memory_bytes


def _empty(topology: Topology) -> str:
    return format_cpus(node.index for node in topology.numa or () if _is_empty(node))
