"""Memory that ranks of one host share, without a name in any file system: it is gone with the last that maps it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def pages(nbytes: int) -> int:
    """Bytes, rounded up to whole pages; at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


class Segment:
    """Memory that is divided among ranks: `[ranks, nbytes]`. What a tensor of it shows is what all ranks see."""

    def __init__(self, flat: Tensor, nbytes: int) -> None:
        """Take memory.

        Args:
            flat: all of it, `[ranks · nbytes]` uint8.
            nbytes: of each rank.
        """
        self.nbytes, self.flat = nbytes, flat
        self._start = flat.data_ptr()

    @classmethod
    def map(cls, descriptor: int, ranks: int, nbytes: int) -> Segment:
        """Map a file; tensors keep the mapping alive.

        Args:
            descriptor: of the file; not kept.
            ranks: how many it is divided among.
            nbytes: of each rank, whole pages.
        """
        return cls(torch.frombuffer(mmap.mmap(descriptor, ranks * nbytes), dtype=torch.uint8), nbytes)

    def of(self, rank: int) -> Tensor:
        """A rank's own bytes, `[nbytes]` uint8."""
        return self.flat.narrow(0, rank * self.nbytes, self.nbytes)

    def offset(self, tensor: Tensor, rank: int) -> int | None:
        """Where a contiguous tensor lies among a rank's bytes; None if it does not lie within them."""
        at = tensor.data_ptr() - self._start - rank * self.nbytes
        return at if at >= 0 and at + tensor.nbytes <= self.nbytes else None


def create(nbytes: int) -> int:
    """A file in memory of as many bytes, none of which takes memory before it is used; returns its descriptor.

    Raises:
        OSError: the system has no such files, or no room.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory (memfd_create)")
    descriptor = os.memfd_create("dthpc", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, rank: int, nbytes: int) -> None:
    """Have the memory of one rank's part provided now, near to this process, rather than fail at its first use.

    Raises:
        OSError: there is not as much.
    """
    os.posix_fallocate(descriptor, rank * nbytes, nbytes)


def free_memory() -> int:
    """Bytes that this process may still take: of the host, and of each control group that it is in."""
    free = [_meminfo("MemAvailable")]
    for limit, used in _control_groups():
        free.append(limit - used)
    return max(0, min(free))


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo does not tell {name}")


def _control_groups() -> list[tuple[int, int]]:
    """Limit and use of the control groups that hold memory in bounds, of this process and all above it."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, which is not there; its own group is then the topmost.
        for where in [place for place in (folder, *folder.parents) if base in (place, *place.parents)]:
            try:
                limit, used = ((where / name).read_text().strip() for name in names)
            except OSError:
                continue
            if limit != "max":
                found.append((int(limit), int(used)))
    return found
