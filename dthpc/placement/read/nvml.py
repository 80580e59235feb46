"""NVIDIA's management library through `pynvml`, where that is installed. It is loaded only when it is asked."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from dthpc.placement.topology import Gpu, GpuPart, Link, Source, Topology, bus_id

KIND = "nvml"

# nvmlGpuTopologyLevel_t
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def read_nvml(words: int = 128) -> Topology | None:
    """The GPUs that NVML shows to this process; None without pynvml, a driver, or a GPU.

    Args:
        words: length of the CPU masks to ask for, in words of 64 CPUs.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # whatever the library lacks, there is nothing to ask
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nvml, place, handle, words) for place, handle in enumerate(handles))
        links = tuple(_links(nvml, handles, gpus))
    finally:
        nvml.nvmlShutdown()
    if not gpus:
        return None
    return Topology(gpus=gpus, links=links or None, sources=(Source(KIND, "pynvml", ("gpus", "links")),))


def _gpu(nvml: Any, place: int, handle: Any, words: int) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    node = _ask(nvml, "nvmlDeviceGetNumaNodeId", handle)
    mask = _ask(nvml, "nvmlDeviceGetCpuAffinity", handle, words)
    cpus = (
        None
        if mask is None
        else frozenset(64 * n + bit for n, word in enumerate(mask) for bit in range(64) if word >> bit & 1)
    )
    return Gpu(
        key=f"GPU{place}",
        index=place,
        bus_id=bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle) or "") or None,
        vendor="nvidia",
        model=_text(_ask(nvml, "nvmlDeviceGetName", handle) or "") or None,
        compute=True,
        visible=True,
        cpus=cpus or None,
        memory_numa=node if isinstance(node, int) and node >= 0 else None,
        memory_bytes=int(memory.total) if memory is not None else None,
        parts=tuple(_parts(nvml, handle)),
    )


def _parts(nvml: Any, handle: Any) -> Iterator[GpuPart]:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] == 0:
        return
    for place in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if part is not None:
            yield GpuPart("mig", place, _text(_ask(nvml, "nvmlDeviceGetUUID", part) or "") or None)


def _links(nvml: Any, handles: list[Any], gpus: tuple[Gpu, ...]) -> Iterator[Link]:
    active = [list(_peers(nvml, handle)) for handle in handles]
    by_bus = {gpu.bus_id: place for place, gpu in enumerate(gpus)}
    for a, b in combinations(range(len(handles)), 2):
        level = _LEVELS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]))
        direct = sum(by_bus.get(peer) == b for peer in active[a])
        # Links that end at no GPU end at switches, which every GPU with such links reaches.
        switched = [sum(peer not in by_bus for peer in active[place]) for place in (a, b)]
        lanes = direct or min(switched)
        yield Link(gpus[a].key, gpus[b].key, level, "nvlink" if lanes else None, lanes or None)


def _peers(nvml: Any, handle: Any) -> Iterator[str | None]:
    for place in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, place) == 1:
            remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, place) or _ask(
                nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, place
            )
            if remote is not None:
                yield bus_id(_text(remote.busId))


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """What NVML answers; None where this driver or this GPU does not support the question."""
    try:
        return getattr(nvml, name)(*arguments)
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
