"""Short messages between neighbouring ranks of one host, over sockets that the ranks themselves read and write.

A process group hands a message to a thread of its own, which wakes the one that waits: two threads to wake for a
message, where the kernel could have woken the right one at once. For small activations that takes longer than the
message. Here the rank that waits sleeps in the socket. Long messages are better off with the process group, whose
thread moves them while the rank computes; a short one is in the kernel's buffer as soon as it has been sent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.watchdog.waiting import waiting

SHORT = 1 << 16
"""Bytes of the longest message that is short."""

_HEAD = 64
"""Bytes before a message's tensor, the first eight of which are its tag; as many as keep the tensor aligned."""

_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""The kernel takes a message now or not at all, and tells by an error that the other end is gone."""

_UNNOTED_S = 1.0
"""How long a rank waits before it notes that in the flight record, which takes time."""

_PATIENCE_S = 20.0
"""How long ranks of one host wait for each other in the handshake, which takes milliseconds."""


class Place(NamedTuple):
    """Where tensors of one form lie in the boxes of a rank's wires."""

    size: torch.Size
    """Their dimensions."""

    dtype: torch.dtype
    """Their number format."""

    inbox: Tensor
    """One that has come."""

    outbox: Tensor
    """One that goes."""

    message: memoryview
    """The outbox from the tag on."""


class Wires:
    """The sockets of one rank; messages from a rank that have the same tag are taken in the order of sending.

    More ranks than cores share their caches, and after a stage's pass nothing of this is in them: every object that
    `send` and `receive` touch counts several-fold, so what is the same for messages of one form is in a `Place`.
    """

    def __init__(self, sockets: dict[int, socket.socket], timeout_s: float, group: Any = None) -> None:
        """Take connected sockets that keep messages apart, by the rank at the other end.

        Args:
            sockets: become this object's.
            timeout_s: how long a rank may keep this one waiting.
            group: the process group whose ranks they are, for the flight record.
        """
        self._sockets, self._timeout_s, self._group = sockets, timeout_s, group
        self._takes = {peer: one.recv_into for peer, one in sockets.items()}
        self._pushes = {peer: one.send for peer, one in sockets.items()}
        self._pending: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._waiting = 0
        self._ended: set[int] = set()
        self._early: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._inbox = torch.empty(_HEAD + SHORT, dtype=torch.uint8)
        self._outbox = torch.empty(_HEAD + SHORT, dtype=torch.uint8)
        self._in, self._out = (memoryview(cast(Any, box.numpy())) for box in (self._inbox, self._outbox))
        self._tag_in, self._tag_out = self._in[:8].cast("q"), self._out[:8].cast("q")
        self._places: dict[tuple[torch.Size, torch.dtype], Place] = {}
        soon_s = min(timeout_s, _UNNOTED_S)
        limit = struct.pack("ll", int(soon_s), int(soon_s % 1 * 1e6))
        for one in sockets.values():
            one.setblocking(True)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * SHORT)
        # A child process that outlives this one would keep the others from seeing its end.
        os.register_at_fork(after_in_child=_Closer(weakref.ref(self)))

    def __contains__(self, peer: int) -> bool:
        return peer in self._sockets

    @property
    def pending(self) -> int:
        """Messages that the kernel has not taken yet."""
        return self._waiting

    def place(self, size: torch.Size, dtype: torch.dtype) -> Place:
        """Where tensors of that form lie; at most `SHORT` bytes long."""
        place = self._places.get((size, dtype))
        if place is None:
            end = _HEAD + size.numel() * dtype.itemsize
            inbox, outbox = (box[_HEAD:end].view(dtype).view(size) for box in (self._inbox, self._outbox))
            place = self._places[size, dtype] = Place(size, dtype, inbox, outbox, self._out[:end])
        return place

    def send(self, peer: int, tag: int, tensor: Tensor, place: Place) -> None:
        """Send a short tensor of that place's form, which may be changed afterwards; never waits.

        Raises:
            DistNetworkError: the other rank is gone.
        """
        place.outbox.copy_(tensor)
        self._tag_out[0] = tag
        if self._waiting:
            self._flush()
        if (self._waiting and self._pending[peer]) or not self._push(peer, place.message):
            self._pending[peer].append(bytes(place.message))
            self._waiting += 1

    def receive(self, peer: int, tag: int, place: Place) -> Tensor:
        """Wait for a message of that place's form.

        Raises:
            DistNetworkError: the other rank is gone, or has sent nothing in time.
        """
        if self._early and (early := self._early.pop((peer, tag), None)):
            message = early.popleft()
            if early:
                self._early[peer, tag] = early
            return message[_HEAD:].view(place.dtype).view(place.size)
        while True:
            if self._waiting:
                self._exchange(peer)
            count = self._take(peer)
            if self._tag_in[0] == tag:
                return place.inbox.clone()
            self._keep(peer, count)

    def finish(self) -> None:
        """Wait until the kernel has taken everything."""
        while self._waiting:
            self._exchange(None)

    def close(self) -> None:
        """Let the others know that nothing more will come."""
        for one in self._sockets.values():
            one.close()
        self._waiting = 0

    def _push(self, peer: int, message: Any) -> bool:
        """Give the kernel a message; returns whether it had room."""
        try:
            self._pushes[peer](message, _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(peer) from error
        return True

    def _take(self, peer: int) -> int:
        """Wait for the next message of a rank, whichever it is; returns its length."""
        try:
            try:
                count = self._takes[peer](self._in)
            except BlockingIOError:
                self._wait_on(peer)
                count = self._takes[peer](self._in)
        except OSError as error:
            raise self._gone(peer) from error
        if not count:
            raise self._gone(peer)
        return count

    def _wait_on(self, peer: int) -> None:
        """Go on waiting for a rank that has kept this one waiting already, where the watchdog sees it."""
        poll = select.poll()
        poll.register(self._sockets[peer], select.POLLIN)
        with waiting(self._group, "recv", peer):
            if not poll.poll(max(0.0, self._timeout_s - _UNNOTED_S) * 1e3):
                why = f"timed out: rank {peer} of the pipeline has sent nothing for {self._timeout_s:g} s"
                raise dist.DistNetworkError(why)

    def _keep(self, peer: int, count: int) -> None:
        self._early[peer, self._tag_in[0]].append(self._inbox[:count].clone())

    def _flush(self) -> None:
        for peer, pending in self._pending.items():
            while pending and self._push(peer, pending[0]):
                pending.popleft()
                self._waiting -= 1

    def _exchange(self, wanted: int | None) -> None:
        """Send what is pending, and take what comes, so that two ranks with full buffers do not wait for each other;
        until something has come from the rank that is wanted, or nothing is pending."""
        self._flush()
        while self._waiting:
            poll = select.poll()
            for peer, one in self._sockets.items():
                if peer not in self._ended:
                    poll.register(one, select.POLLIN | (select.POLLOUT if self._pending[peer] else 0))
            events = dict(poll.poll(self._timeout_s * 1e3))
            if not events:
                raise dist.DistNetworkError(
                    f"timed out: no rank of the pipeline has taken anything for {self._timeout_s:g} s"
                )
            for peer, one in self._sockets.items():
                if events.get(one.fileno(), 0) & ~select.POLLOUT:
                    if peer == wanted:
                        return
                    try:
                        self._keep(peer, self._take(peer))
                    except dist.DistNetworkError:
                        self._ended.add(peer)  # it may have had all it needs; if not, that turns out when it is used
            self._flush()

    @staticmethod
    def _gone(peer: int) -> Exception:
        return dist.DistNetworkError(f"connection closed: rank {peer} of the pipeline is gone")


class _Closer:
    """Closes the sockets in a child process."""

    def __init__(self, wires: weakref.ref[Wires]) -> None:
        self._wires = wires

    def __call__(self) -> None:
        wires = self._wires()
        if wires is not None:
            wires.close()


def connect(group: dist.ProcessGroup, neighbours: Iterable[int]) -> dict[int, socket.socket]:
    """Connect a rank to those of its neighbours that run on the same host, for the same user; collective.

    Args:
        group: the pipeline's ranks.
        neighbours: ranks of the group that this one exchanges messages with; mutual.

    Returns:
        Sockets that keep messages apart. A neighbour that has none for this rank is not in it.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        address, listener = None, stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with contextlib.suppress(OSError):
            # A name of a network namespace: nothing is left behind in a file system.
            listener.bind(b"\0dthpc-" + secrets.token_hex(16).encode())
            listener.listen(ranks)
            address = listener.getsockname()
        rows = _gather(group, (_host(), address))
        near = {peer for peer in neighbours if address is not None and rows[peer][0] == rows[rank][0] and rows[peer][1]}
        for peer in sorted(near):
            if peer < rank:
                with contextlib.suppress(OSError):
                    sockets[peer] = _call(rows[peer][1], rank)
        called = _gather(group, set(sockets))
        expected = {peer for peer in near if peer > rank and rank in called[peer]}
        sockets |= _answer(listener, expected)
        have = _gather(group, set(sockets))
    for peer in list(sockets):
        if rank not in have[peer]:
            sockets.pop(peer).close()
    return sockets


def _call(address: bytes, rank: int) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        one.settimeout(_PATIENCE_S)
        one.connect(address)
        one.send(struct.pack("i", rank))
    except OSError:
        one.close()
        raise
    return one


def _answer(listener: socket.socket, expected: set[int]) -> dict[int, socket.socket]:
    """The sockets of the ranks that have called."""
    listener.settimeout(_PATIENCE_S)
    sockets: dict[int, socket.socket] = {}
    with contextlib.suppress(OSError):
        while expected - sockets.keys():
            one, _ = listener.accept()
            one.settimeout(_PATIENCE_S)
            # Everybody on the host can see the name.
            _, user, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            hello = one.recv(4) if user == os.geteuid() else b""
            peer = struct.unpack("i", hello)[0] if len(hello) == 4 else -1
            if peer in expected and peer not in sockets:
                sockets[peer] = one
            else:
                one.close()
    return sockets


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, mine, group=group)
    return rows


def _host() -> tuple[str, str, int]:
    """What processes have in common that see the same abstract sockets."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return os.uname().nodename, "", os.getpid()
    return os.uname().nodename, boot, space
