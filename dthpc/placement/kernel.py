"""The kernel's calls for memory policies, by ctypes: Python has none, and libnuma is not on every node."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Iterable

PREFERRED, BIND, PREFERRED_MANY = 1, 2, 5

_NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
    "ppc64le": {"get_mempolicy": 260, "set_mempolicy": 261, "move_pages": 301},
}
"""Numbers of the system calls (`asm/unistd.h`)."""


def set_memory_policy(mode: int, nodes: Iterable[int]) -> None:
    """The policy of pages that this thread, and threads and processes that it starts from now on, will touch first.

    Args:
        mode: `PREFERRED` (other nodes when these are full) or `BIND` (only these). Several preferred nodes need
            Linux 5.15; on an older one the lowest is taken.
        nodes: memory nodes.

    Raises:
        OSError: the kernel refuses (a container's filter, a node that may not be used) or has no such call.
    """
    wanted = sorted(set(nodes))
    if mode == PREFERRED and len(wanted) > 1:
        with contextlib.suppress(OSError):
            _set_policy(PREFERRED_MANY, wanted)
            return
        wanted = wanted[:1]
    _set_policy(mode, wanted)


def memory_policy() -> tuple[int, frozenset[int]]:
    """Mode and nodes of this thread's memory policy; mode 0 is the default: the node of the CPU that runs.

    Raises:
        OSError: the kernel refuses or has no such call.
    """
    mode = ctypes.c_int()
    bits = (ctypes.c_ulong * 16)()
    _call("get_mempolicy", ctypes.byref(mode), bits, ctypes.c_ulong(16 * 64), None, ctypes.c_ulong(0))
    nodes = (word * 64 + bit for word, value in enumerate(bits) for bit in range(64) if value >> bit & 1)
    return mode.value & 0xFF, frozenset(nodes)


def nodes_of_fresh_pages(size: int = 1 << 20) -> dict[int, int]:
    """Pages by the memory node that they come from, of memory that is taken and written to now.

    Args:
        size: bytes to take.

    Raises:
        OSError: the kernel refuses or has no such call.
    """
    step = mmap.PAGESIZE
    with mmap.mmap(-1, size) as memory:
        count = size // step
        for page in range(count):
            memory[page * step] = 1
        held = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(held)
        pages = (ctypes.c_void_p * count)(*(start + page * step for page in range(count)))
        status = (ctypes.c_int * count)()
        try:
            _call("move_pages", 0, ctypes.c_ulong(count), pages, None, status, 0)
        finally:
            del held
    found: dict[int, int] = {}
    for node in status:
        if node >= 0:
            found[node] = found.get(node, 0) + 1
    return found


def _set_policy(mode: int, nodes: list[int]) -> None:
    words = max(nodes, default=0) // 64 + 1
    bits = (ctypes.c_ulong * words)()
    for node in nodes:
        bits[node // 64] |= 1 << node % 64
    # The kernel reads one bit less than it is told.
    _call("set_mempolicy", mode, bits, ctypes.c_ulong(words * 64 + 1))


def _call(name: str, *arguments: object) -> None:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(38, f"the number of {name} is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
