"""The same GPU or NIC found in several sources, under other names in each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from dthpc.placement.cpuset import format_cpus
from dthpc.placement.topology import Conflict, Gpu, Link, Nic, Topology

T = TypeVar("T")

_VENDOR_TOOLS = (
    "nvml",
    "nvidia-smi -q -x",
    "nvidia-smi csv",
    "amd-smi",
    "rocm-smi",
    "nvidia-smi topo",
    "nvidia-smi -L",
)


def combine_gpus(
    ranked: Sequence[Topology], conflicts: list[Conflict], notes: list[str]
) -> tuple[tuple[Gpu, ...] | None, list[dict[str, str]]]:
    """The GPUs of all parts, and for each part the names that they got.

    A GPU is known again by its bus id, its UUID, or its number. Where one part has only bus ids and another only
    numbers, they are matched in order of bus id, as the vendors' tools count, if there are as many and what both say
    of their memory nodes agrees; it is noted.
    """
    numbers = _numbers(ranked, conflicts, notes)
    found: dict[str, tuple[Gpu, str]] = {}
    names: list[dict[str, str]] = []
    tools = [part for part in ranked if _kind(part) in _VENDOR_TOOLS and part.gpus]
    for part in ranked:
        mine: dict[str, str] = {}
        for gpu in part.gpus or ():
            number = numbers.get(gpu.bus_id or "", numbers.get(gpu.uuid or "", gpu.index))
            key = (gpu.bus_id or gpu.key) if number is None else f"GPU{number}"
            mine[gpu.key] = key
            shown = True if part in tools else gpu.visible
            kept, origin = found.get(key, (replace(gpu, key=key, index=number, visible=shown), _kind(part)))
            _compare(key, kept, gpu, origin, _kind(part), conflicts)
            found[key] = (replace(filled(kept, gpu), visible=kept.visible or shown), origin)
        names.append(mine)
    gpus = [replace(gpu, visible=bool(gpu.visible)) if tools else gpu for gpu, _ in found.values()]
    gpus.sort(key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.bus_id or gpu.key))
    return (tuple(gpus) if any(part.gpus is not None for part in ranked) else None), names


def _numbers(ranked: Sequence[Topology], conflicts: list[Conflict], notes: list[str]) -> dict[str, int]:
    """The number of each GPU by its bus id and by its UUID, as far as any part tells it."""
    numbers: dict[str, int] = {}
    for part in ranked:
        for gpu in part.gpus or ():
            for name in (gpu.bus_id, gpu.uuid):
                if name and gpu.index is not None and numbers.setdefault(name, gpu.index) != gpu.index:
                    kept = f"GPU{numbers[name]}"
                    conflicts.append(Conflict(f"number of {name}", kept, "an earlier source", gpu.key, _kind(part)))
    placed = [gpu for part in ranked for gpu in part.gpus or () if gpu.bus_id and gpu.index is None]
    bare = next((part.gpus for part in ranked if part.gpus and all(gpu.bus_id is None for gpu in part.gpus)), ())
    places = {gpu.bus_id: gpu for gpu in reversed(placed) if gpu.bus_id and gpu.compute is not False}
    if not numbers and places and bare:
        pairs = list(zip(sorted(places), sorted(bare, key=lambda gpu: gpu.index or 0), strict=False))
        if len(places) == len(bare) and all(_alike(places[name], gpu) for name, gpu in pairs):
            notes.append("GPUs are matched in the order of their bus ids: no source gives both bus ids and numbers")
            numbers = {name: gpu.index for name, gpu in pairs if gpu.index is not None}
        else:
            notes.append("the GPUs of two sources cannot be matched")
    return numbers


def _alike(one: Gpu, other: Gpu) -> bool:
    return not one.numa or not other.numa or bool(set(one.numa) & set(other.numa))


def combine_nics(
    ranked: Sequence[Topology], conflicts: list[Conflict], notes: list[str]
) -> tuple[tuple[Nic, ...] | None, list[dict[str, str]]]:
    """The NICs of all parts, and for each part the names that they got; known again by name, bus id or interface."""
    found: list[Nic] = []
    origins: list[str] = []
    names: list[dict[str, str]] = []
    nameless = False
    for part in ranked:
        mine: dict[str, str] = {}
        for nic in part.nics or ():
            place = next((place for place, other in enumerate(found) if _same_nic(other, nic)), None)
            if place is not None:
                _compare(found[place].name, found[place], nic, origins[place], _kind(part), conflicts)
                found[place] = _filled_nic(found[place], nic)
                mine[nic.name] = found[place].name
            elif re.fullmatch(r"NIC\d+", nic.name) and found:
                nameless = True
            else:
                found.append(nic)
                origins.append(_kind(part))
                mine[nic.name] = nic.name
        names.append(mine)
    if nameless:
        notes.append(
            "NICs that nvidia-smi shows without names cannot be matched with those of other sources, and are left out"
        )
    return (tuple(found) if any(part.nics is not None for part in ranked) else None), names


def _same_nic(one: Nic, other: Nic) -> bool:
    if one.bus_id and other.bus_id:
        return one.bus_id == other.bus_id
    return one.name == other.name or other.name in (one.interfaces or ()) or one.name in (other.interfaces or ())


def rename_links(
    ranked: Sequence[Topology], names: Sequence[Mapping[str, str]], conflicts: list[Conflict]
) -> tuple[Link, ...] | None:
    """The links of all parts between the devices' final names, each fact from the first that tells it."""
    found: dict[frozenset[str], tuple[Link, str]] = {}
    for part, mine in zip(ranked, names, strict=True):
        for link in part.links or ():
            if link.a not in mine or link.b not in mine:
                continue
            link = replace(link, a=mine[link.a], b=mine[link.b])
            pair = frozenset((link.a, link.b))
            if pair not in found:
                found[pair] = (link, _kind(part))
                continue
            kept, origin = found[pair]
            if kept.level and link.level and kept.level != link.level:
                conflicts.append(Conflict(f"{link.a} to {link.b}", kept.level, origin, link.level, _kind(part)))
            found[pair] = (filled(kept, link), origin)
    known = any(part.links is not None for part in ranked)
    return tuple(link for link, _ in found.values()) if known else None


def _kind(part: Topology) -> str:
    return part.sources[0].kind if part.sources else "unknown"


def filled(kept: T, other: T) -> T:
    """A record with its unknown fields filled from another."""
    facts: Any = kept
    empty = [entry.name for entry in fields(facts) if entry.init and getattr(kept, entry.name) in (None, ())]
    known = {name: getattr(other, name) for name in empty if getattr(other, name) is not None}
    merged: T = replace(facts, **known)
    return merged


def _filled_nic(kept: Nic, other: Nic) -> Nic:
    ports = {port.number: port for port in kept.ports or ()}
    for port in other.ports or ():
        ports[port.number] = filled(ports[port.number], port) if port.number in ports else port
    # A name that RDMA software knows is worth more than an interface's or a bus id.
    name = other.name if other.rdma and not kept.rdma else kept.name
    merged = filled(kept, other)
    return replace(
        merged, name=name, rdma=kept.rdma or other.rdma, ports=tuple(ports[n] for n in sorted(ports)) or None
    )


def _compare(
    name: str, kept: Gpu | Nic, other: Gpu | Nic, kept_from: str, other_from: str, conflicts: list[Conflict]
) -> None:
    """Conflicts of memory nodes, of CPUs and of bus ids. A tool within a cgroup shows fewer CPUs, which is none."""
    if kept.numa and other.numa and not set(kept.numa) & set(other.numa):
        said = (",".join(map(str, numa)) for numa in (kept.numa, other.numa))
        conflicts.append(Conflict(f"memory node of {name}", next(said), kept_from, next(said), other_from))
    if kept.cpus and other.cpus and not (kept.cpus <= other.cpus or other.cpus <= kept.cpus):
        one, two = format_cpus(kept.cpus), format_cpus(other.cpus)
        conflicts.append(Conflict(f"CPUs near {name}", one, kept_from, two, other_from))
    if kept.bus_id and other.bus_id and kept.bus_id != other.bus_id:
        conflicts.append(Conflict(f"bus id of {name}", kept.bus_id, kept_from, other.bus_id, other_from))
