"""How the ranks of a group find out whether they share a host, and come to share memory there.

They agree on every outcome: all of them share memory, or none does and all know why. Sockets have names that the
kernel keeps (abstract ones, of a network namespace), so nothing is left behind in a file system.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dthpc.comm.shared.exchange import Exchange, window_bytes
from dthpc.comm.shared.room import Room
from dthpc.comm.shared.segment import free_memory

PATIENCE_S = 20.0
"""How long ranks of one host wait for each other in the handshake; it takes milliseconds."""

LARGEST_PART = 8
"""Windows of a group may take this part of the memory that is free: one over it."""


@dataclass(frozen=True)
class Meeting:
    """What came of a handshake."""

    exchange: Exchange | None
    """The way over memory; None: there is none."""

    reason: str
    """Why there is one, or none; the same on all ranks."""


def share_memory(group: dist.ProcessGroup, timeout_s: float) -> Meeting:
    """Have the ranks of a group share memory if all run on one host; collective.

    Args:
        group: of two ranks or more, that can gather objects.
        timeout_s: how long a rank may keep others waiting in a collective.
    """
    listener = None
    try:
        listener = _listen()
        mine: dict[str, Any] = {"host": _host(), "address": listener.getsockname(), "free": free_memory()}
    except OSError as error:
        mine = {"host": _host(), "problem": _words(error)}
    try:
        rows = _gather(group, {**mine, "rank": dist.get_rank(), "pid": os.getpid()})
        reason = _obstacle(rows)
        if reason is not None or listener is None:
            return Meeting(None, reason or "no socket")
        return _meet(group, rows, listener, timeout_s)
    finally:
        if listener is not None:
            listener.close()


def _meet(group: dist.ProcessGroup, rows: list[dict[str, Any]], listener: socket.socket, timeout_s: float) -> Meeting:
    """Connect, and get the first memory; whoever cannot tells the others."""
    rank, problem, room, exchange = dist.get_rank(group), None, None, None
    names = [f"rank {row['rank']} (process {row['pid']})" for row in rows]
    try:
        room = Room(names, rank, _connect(rank, [row["address"] for row in rows], listener), PATIENCE_S)
    except OSError as error:
        problem = f"{names[rank]}: {_words(error)}"
    problem = _first(_gather(group, problem))
    if room is None or problem is not None:
        return Meeting(None, f"no connection within the host: {problem}")
    try:
        exchange = Exchange(room, room.allocate(window_bytes(len(rows))))
        room.set_timeout(timeout_s)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"{names[rank]}: {_words(error)}"
    problem = _first(_gather(group, problem))
    if exchange is None or problem is not None:
        room.close()
        return Meeting(None, f"no memory to share: {problem}")
    return Meeting(exchange, f"{len(rows)} ranks of one host share memory")


def _obstacle(rows: list[dict[str, Any]]) -> str | None:
    hosts = {row["host"] for row in rows}
    if len(hosts) > 1:
        return f"ranks run on {len(hosts)} hosts"
    problem = _first([row.get("problem") for row in rows])
    if problem is not None:
        return problem
    free, wanted = min(row["free"] for row in rows), len(rows) * window_bytes(len(rows))
    if wanted > free // LARGEST_PART:
        return f"{free >> 20} MiB of memory are free, too few for {wanted >> 20} MiB to share"
    return None


def _host() -> tuple[str, str, int]:
    """What two processes have in common if they run on one host and see the same abstract sockets."""
    try:
        return (
            os.uname().nodename,
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            Path("/proc/self/ns/net").stat().st_ino,
        )
    except OSError:
        return os.uname().nodename, "", os.getpid()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0dthpc-" + secrets.token_hex(16).encode())
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(rank: int, addresses: list[bytes], listener: socket.socket) -> dict[int, socket.socket]:
    """A socket to each other rank: to those before it made by this one, from those after it taken."""
    deadline = time.monotonic() + PATIENCE_S
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            sockets[peer] = one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.settimeout(PATIENCE_S)
            one.connect(addresses[peer])
            one.sendall(struct.pack("i", rank))
        while len(sockets) < len(addresses) - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            one, _ = listener.accept()
            # Names of abstract sockets are no secret on the host: only this user's processes may come in.
            _, user, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            one.settimeout(PATIENCE_S)
            hello = one.recv(4) if user == os.geteuid() else b""
            peer = struct.unpack("i", hello)[0] if len(hello) == 4 else -1
            if not rank < peer < len(addresses) or peer in sockets:
                one.close()
                continue
            sockets[peer] = one
    except OSError:
        for one in sockets.values():
            one.close()
        raise
    return sockets


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, mine, group=group)
    return rows


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
