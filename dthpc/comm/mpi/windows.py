"""MPI-3 shared windows: memory that the ranks of a node see, for sums that are faster there than in MPI.

Through a window the ranks add what lies in each other's caches, a piece at a time (`dthpc.comm.shared.exchange`). They
tell each other how far they are by counters in the window; `MPI_Win_sync` keeps these and the data in order, as section
12.7 of MPI 4.0 describes the unified memory model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from dthpc.comm.shared.exchange import Exchange, window_bytes, words
from dthpc.comm.shared.room import READY, RankLost
from dthpc.comm.shared.segment import Segment, pages

_LINE = 64
_SHM = "/dev/shm"
_LARGEST_PART = 8
"""A window may take this part of what /dev/shm has free: one over it."""

_LARGEST_PART_OF_ALL = 2
"""The same for windows of all ranks of a node: groups beside each other are made at the same time, and see the same
free."""


class Windows:
    """The windows of one process.

    `MPI_Win_free` waits for all ranks, so a group that is destroyed leaves its window for the next one of the same
    ranks.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._neighbours = min(mpi.COMM_WORLD.Get_size(), os.cpu_count() or 1)
        self._made: dict[tuple[int, ...], list[Exchange]] = {}
        self._free: dict[tuple[int, ...], int] = {}
        self._near: list[frozenset[int]] = []
        self._signals: list[WindowSignals] = []

    def take(self, comm: Any, members: Sequence[int]) -> Exchange | None:
        """A way through memory for the ranks of a communicator; collective.

        Args:
            comm: the communicator.
            members: its ranks in MPI's world.

        Returns:
            None, on all ranks: they do not share memory, or there is too little of it.
        """
        key = tuple(members)
        if len(key) < 2 or not self._on_one_node(comm, frozenset(key)):
            return None
        made = self._made.setdefault(key, [])
        # Ranks may have destroyed earlier groups or not; what all have free is free.
        told = comm.allgather((self._free.get(key, 0), _room()))
        free = -1
        for mask, _ in told:
            free &= mask
        if free:
            number = (free & -free).bit_length() - 1
            self._free[key] &= ~(1 << number)
            return made[number]
        wanted = window_bytes(len(key))
        parts = max(_LARGEST_PART * len(key), _LARGEST_PART_OF_ALL * self._neighbours)
        if min(room for _, room in told) < parts * wanted:
            return None
        signals = WindowSignals(self._mpi, comm)
        self._signals.append(signals)
        # Who starts an asynchronous collective has other things to do than to copy.
        exchange = Exchange(signals, signals.allocate(wanted), eager=False)
        # The group's own methods are in the flight record.
        exchange.recorded = False
        made.append(exchange)
        return exchange

    def give(self, exchange: Exchange, members: Sequence[int]) -> None:
        """Return a window of which all collectives are complete."""
        key = tuple(members)
        self._free[key] = self._free.get(key, 0) | 1 << self._made[key].index(exchange)

    def close(self) -> None:
        """End all use; nothing may be under way."""
        for signals in self._signals:
            signals.close()

    def _on_one_node(self, comm: Any, members: frozenset[int]) -> bool:
        # All members of what is known took part in finding it out, so all know.
        if any(members <= known for known in self._near):
            return True
        near = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        one = bool(near.Get_size() == comm.Get_size())
        near.Free()
        if one:
            self._near.append(members)
        return one


def _room() -> int:
    """Bytes free where MPI libraries keep shared windows: using more of them than there are kills a process."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


class WindowSignals:
    """Counters in a window, by which ranks tell each other how far they are; see `dthpc.comm.shared.exchange.Signals`.

    Who waits asks again and again, as with any operation of MPI.
    """

    def __init__(self, mpi: Any, comm: Any, timeout_s: float = 600.0) -> None:
        """Make the counters; collective.

        Args:
            mpi: the module `mpi4py.MPI`.
            comm: a communicator whose ranks share memory.
            timeout_s: how long `await_ready` and `await_done` wait.
        """
        self._mpi, self._comm, self._timeout_s = mpi, comm.Dup(), timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self._windows: list[Any] = []
        counters = self.allocate(2 * _LINE)
        parts = [words(counters.of(rank)) for rank in range(self.size)]
        self._ready, self._done = ([part[at : at + 1] for part in parts] for at in (0, _LINE // 8))
        self._sync = self._windows[0].Sync

    def tell(self, signal: bytes) -> None:
        """Count one more `READY` or `DONE` of this rank."""
        self._sync()
        (self._ready if signal == READY else self._done)[self.rank][0] += 1

    def look(self) -> None:
        """Nothing: the counters are read where they are."""

    def has_ready(self, count: int) -> bool:
        """Whether each of the others has counted as many `READY`."""
        return self._have(self._ready, count)

    def has_done(self, count: int) -> bool:
        """The same for `DONE`."""
        return self._have(self._done, count)

    def await_ready(self, count: int) -> None:
        """Wait for it.

        Raises:
            RankLost: it did not come in time.
        """
        self._await(self._ready, count)

    def await_done(self, count: int) -> None:
        """The same for `DONE`."""
        self._await(self._done, count)

    def allocate(self, nbytes: int) -> Segment:
        """Memory that all ranks see, `nbytes` of each, rounded up to pages; collective. Bytes are zero."""
        share = pages(nbytes)
        window = self._mpi.Win.Allocate_shared(share, 1, self._mpi.INFO_NULL, self._comm)
        window.Lock_all(self._mpi.MODE_NOCHECK)
        self._windows.append(window)
        # By default the parts of the ranks follow one another.
        buffer, _ = window.Shared_query(0)
        whole = self._mpi.buffer.fromaddress(buffer.address, self.size * share)
        segment = Segment(torch.frombuffer(whole, dtype=torch.uint8), share)
        segment.of(self.rank).zero_()
        window.Sync()
        self._comm.Barrier()
        window.Sync()
        return segment

    def close(self) -> None:
        """Give the memory up."""
        for window in self._windows:
            window.Unlock_all()
        self._windows.clear()

    def _have(self, counters: Sequence[memoryview], count: int) -> bool:
        for peer in self.peers:
            if counters[peer][0] < count:
                return False
        self._sync()
        return True

    def _await(self, counters: Sequence[memoryview], count: int) -> None:
        limit = time.monotonic() + self._timeout_s
        while not self._have(counters, count):
            os.sched_yield()
            if time.monotonic() > limit:
                raise RankLost(f"a rank of the node did not take part in a collective within {self._timeout_s:g} s")
