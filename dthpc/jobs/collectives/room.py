"""How much memory this machine has left, and the largest message that its ranks have room for; free of torch."""

from __future__ import annotations

import re
from pathlib import Path

COPIES = 6
"""Bytes in memory for each byte of the largest message: two buffers of the job, and what a library may take for
copies, the pieces under way and what the kernel holds in sockets."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken: what the kernel calls available, and what the process's cgroups leave.

    Args:
        root: where `proc` and `sys` are mounted.

    Returns:
        None where nothing of it can be read.
    """
    bounds = [*_of_machine(root), *_of_cgroups(root)]
    return max(0, min(bounds)) if bounds else None


def largest_message(free: int | None, ranks: int, share: float) -> int:
    """Bytes of the largest message for each of the ranks of a node; 1 GiB where nobody knows the memory.

    Args:
        free: bytes.
        ranks: of the node.
        share: part of it that they may take.
    """
    if free is None:
        return 1 << 30
    return max(8, int(free * share / ranks / COPIES))


def _of_machine(root: Path) -> list[int]:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return [int(match[1]) * 1024] if match else []


def _of_cgroups(root: Path) -> list[int]:
    """What each cgroup above this process leaves, by version 2 (`memory.max`) and 1 (`memory.limit_in_bytes`)."""
    bounds = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                bounds.append(int(limit) - int(used))
    return bounds


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
