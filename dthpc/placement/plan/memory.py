"""Which memory nodes a rank takes its pages from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dthpc.placement.plan.cores import CoreSeat, distances_from
from dthpc.placement.topology import Gpu, Topology


def memory_of(topology: Topology, cores: Sequence[CoreSeat], gpu: Gpu | None) -> tuple[tuple[int, ...] | None, str]:
    """Memory nodes of a rank, the one of most of its cores first, and the reason.

    A GPU's own memory that the system shows as a node is never among them: pages there would take room from the GPU.

    Args:
        topology: of the node.
        cores: cores of the rank; empty where nobody tells.
        gpu: its first GPU.
    """
    counts = Counter(core.numa for core in cores if core.numa is not None)
    if not counts:
        told = gpu.numa if gpu is not None else None
        return (told, f"told as nearest to {gpu.key}") if told and gpu is not None else (None, "no memory node is told")
    if not topology.numa:
        return tuple(sorted(counts, key=lambda node: (-counts[node], node))), "that of its cores"
    nodes = [node for node, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    usable = _usable(topology)
    own = tuple(node for node in nodes if node in usable)
    if own:
        return own, "the only one" if len(usable) == 1 else "that of its cores"
    away = distances_from(topology, nodes[0])
    if not usable:
        return None, "no memory node that may be used is told"
    near = min(usable, key=lambda node: (away.get(node, 1 << 16), node))
    return (near,), f"memory node {nodes[0]} of its cores has no memory or may not be used; the nearest that may"


def _usable(topology: Topology) -> list[int]:
    of_gpus = {gpu.memory_numa for gpu in topology.gpus or ()}
    allowed = topology.allowed_memory
    return [
        node.index
        for node in topology.numa or ()
        if node.has_memory is not False and node.index not in of_gpus and (allowed is None or node.index in allowed)
    ]
