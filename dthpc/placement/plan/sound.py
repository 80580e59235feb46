"""Whether a topology can be true: what it says in one place must not rule out what it says in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, format_cpus
from dthpc.placement.topology import Topology


def demand_sound(topology: Topology) -> None:
    """Refuse a topology that contradicts itself.

    Raises:
        UserError: it does; all contradictions are told.
    """
    found = list(contradictions(topology))
    if found:
        where = ", ".join(source.where for source in topology.sources) or topology.host
        raise UserError(
            "the topology contradicts itself: " + "; ".join(found),
            key="topology",
            value=where,
            instead="record the node again, or leave out the text that is wrong",
        )


def contradictions(topology: Topology) -> Iterator[str]:
    """What can't be, one clause each."""
    # Several kinds of memory may be near to the same CPUs, so that equal sets are no contradiction.
    yield from _overlaps("memory nodes", [(f"{n.index}", n.cpus) for n in topology.numa or ()], equal=True)
    yield from _overlaps("packages", [(f"{p.index}", p.cpus) for p in topology.packages or ()])
    yield from _overlaps("cores", [(format_cpus(core.cpus), core.cpus) for core in topology.cores or ()])
    yield from _overlaps("caches", [(format_cpus(cache.cpus), cache.cpus) for cache in topology.caches or ()])
    for what, names in (
        ("memory nodes", [str(node.index) for node in topology.numa or ()]),
        ("GPUs", [gpu.key for gpu in topology.gpus or ()]),
        ("NICs", [nic.name for nic in topology.nics or ()]),
    ):
        for name in [name for name, count in Counter(names).items() if count > 1]:
            yield f"two {what} are called {name}"
    yield from _places(topology)


def _overlaps(what: str, sets: Sequence[tuple[str, CpuSet | None]], equal: bool = False) -> Iterator[str]:
    owner: dict[int, tuple[str, CpuSet]] = {}
    for name, cpus in sets:
        for cpu in sorted(cpus or ()):
            other, its = owner.setdefault(cpu, (name, cpus or frozenset()))
            if other != name and not (equal and its == cpus):
                yield f"CPU {cpu} is in the {what} {other} and {name}"
                break


def _places(topology: Topology) -> Iterator[str]:
    nodes = {node.index: node for node in topology.numa or ()}
    for gpu in topology.gpus or ():
        absent = [index for index in gpu.numa or () if nodes and index not in nodes]
        if absent and topology.complete:
            yield f"{gpu.key} is near to memory node {absent[0]}, and the nodes are {', '.join(map(str, nodes))}"
        near: CpuSet = frozenset().union(*(nodes[index].cpus or () for index in gpu.numa or () if index in nodes))
        if near and gpu.cpus and not near & gpu.cpus:
            told = f"CPUs {format_cpus(gpu.cpus)} and to memory node {', '.join(map(str, gpu.numa or ()))}"
            yield f"{gpu.key} is near to {told}, which has CPUs {format_cpus(near)}"
