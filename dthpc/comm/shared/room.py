"""Ranks of one host that share memory: how they tell each other what is there, and notice that one is gone.

Between each two ranks is a socket. A signal is one byte in it: the kernel orders it behind what was written to memory
before, wakes the one that waits, and tells at once when a rank has ended, however it did. Nobody ever spins, as there
may be more ranks than cores.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping

from dthpc.comm.shared.segment import Segment, create, pages, reserve

READY, DONE, LEAVES = b"r", b"d", b"q"
_READY, _DONE, _LEAVES = READY[0], DONE[0], LEAVES[0]
_MANY = 4096


class ExchangeError(RuntimeError):
    """Ranks can't exchange any more."""


class RankLost(ExchangeError):
    """A rank has ended, or did not take part in time."""


class Room:
    """One rank's end of the sockets and the shared memory of a group."""

    def __init__(self, names: list[str], rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        """Take connected sockets.

        Args:
            names: of the ranks, for errors.
            rank: this one's position.
            sockets: to each other rank, by its position.
            timeout_s: how long a rank may keep others waiting.
        """
        self.names, self.rank, self.size = names, rank, len(names)
        self.peers = sorted(sockets)
        self.ready = dict.fromkeys(self.peers, 0)
        self.done = dict.fromkeys(self.peers, 0)
        self._sockets = dict(sockets)
        self._left: set[int] = set()
        self._poller = select.poll()
        self._peer_of: dict[int, int] = {}
        for peer, one in self._sockets.items():
            one.setblocking(True)
            self._peer_of[one.fileno()] = peer
            self._poller.register(one.fileno(), select.POLLIN)
        self.set_timeout(timeout_s)
        self._only = self._sockets[self.peers[0]] if len(self.peers) == 1 else None
        held = list(self._sockets.values())
        self._close = weakref.finalize(self, _leave, held, os.getpid())
        # A child must not keep a rank's sockets open after its death.
        os.register_at_fork(after_in_child=_Closer(weakref.ref(self)))

    def set_timeout(self, seconds: float) -> None:
        """How long a rank may keep others waiting from now on."""
        self.timeout_s = seconds
        for one in self._sockets.values():
            whole = int(seconds)
            limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        """Tell the others that this rank takes no further part; nothing may be under way."""
        self._close()

    def tell(self, signal: bytes) -> None:
        """Send a signal to all others.

        It never waits: a socket has room for hundreds, and ranks are not as many steps ahead of each other.
        """
        for one in self._sockets.values():
            # Whether one that has ended is missed turns out when something is awaited from it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.send(signal, socket.MSG_NOSIGNAL)

    def look(self) -> None:
        """Take in the signals that have come, without waiting."""
        for peer in self.peers:
            if peer not in self._left:
                with contextlib.suppress(BlockingIOError):
                    self._take(peer, _receive(self._sockets[peer], socket.MSG_DONTWAIT))

    def await_ready(self, count: int) -> None:
        """Wait until each of the others has sent as many `READY` signals since the beginning.

        Raises:
            RankLost: one has ended, or did not send them in time.
        """
        self._await(self.ready, count)

    def await_done(self, count: int) -> None:
        """The same for `DONE`."""
        self._await(self.done, count)

    def has_ready(self, count: int) -> bool:
        """Whether each of the others has sent as many `READY` signals, as far as was looked."""
        return min(self.ready.values()) >= count

    def has_done(self, count: int) -> bool:
        """The same for `DONE`."""
        return min(self.done.values()) >= count

    def allocate(self, nbytes: int) -> Segment:
        """Memory that all ranks see, `nbytes` (of this rank, rounded up to pages) of each; collective.

        Nothing may be under way. Bytes are zero.

        Raises:
            OSError: there is not as much memory; the ranks that could get it then wait in vain for the others, so it is
                for them to agree on what follows.
        """
        share = pages(nbytes)
        if self.rank == 0:
            descriptor = create(self.size * share)
            for peer in self.peers:
                socket.send_fds(self._sockets[peer], [b"f"], [descriptor])
        else:
            descriptor = self._receive_descriptor()
        try:
            reserve(descriptor, self.rank, share)
            return Segment.map(descriptor, self.size, share)
        finally:
            os.close(descriptor)

    def _receive_descriptor(self) -> int:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sockets[0], 1, 1)
            except BlockingIOError:
                raise self._late([0]) from None
            if descriptors:
                return descriptors[0]
            self._take(0, data)
            if not data:
                raise self._lost(0)

    def _await(self, counts: dict[int, int], count: int) -> None:
        deadline: float | None = None
        while True:
            missing = [peer for peer in self.peers if counts[peer] < count]
            if not missing:
                return
            for peer in missing:
                if peer in self._left:
                    raise self._lost(peer)
            if self._only is not None:
                try:
                    self._take(missing[0], _receive(self._only))
                except BlockingIOError:
                    raise self._late(missing) from None
                continue
            # All are watched, so that a rank's death is told as that, not as the silence of those that wait for it.
            now = time.monotonic()
            deadline = now + self.timeout_s if deadline is None else deadline
            events = self._poller.poll(max(0.0, deadline - now) * 1e3)
            if not events:
                raise self._late(missing)
            for descriptor, _ in events:
                peer = self._peer_of[descriptor]
                self._take(peer, _receive(self._sockets[peer]))

    def _take(self, peer: int, data: bytes) -> None:
        ready = data.count(_READY)
        self.ready[peer] += ready
        if ready != len(data):
            self.done[peer] += data.count(_DONE)
        if not data or data[-1] == _LEAVES:
            self._left.add(peer)
            if self._only is None:
                self._poller.unregister(self._sockets[peer].fileno())
            if not data:
                raise self._lost(peer)

    def _lost(self, peer: int) -> RankLost:
        return RankLost(f"{self.names[peer]} has ended, and others wait for it in a collective")

    def _late(self, missing: list[int]) -> RankLost:
        names = ", ".join(self.names[peer] for peer in missing)
        return RankLost(f"{names} did not take part in a collective within {self.timeout_s:g} s")


class _Closer:
    """Closes a room's sockets in a child process."""

    def __init__(self, room: weakref.ref[Room]) -> None:
        self._room = room

    def __call__(self) -> None:
        room = self._room()
        if room is not None:
            for one in room._sockets.values():
                one.close()


def _receive(one: socket.socket, flags: int = 0) -> bytes:
    try:
        return one.recv(_MANY, flags)
    except ConnectionResetError:
        return b""


def _leave(sockets: list[socket.socket], owner: int) -> None:
    for one in sockets:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                one.send(LEAVES, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        one.close()
