"""Collectives over shared memory, as a queue of steps that every rank goes through in the same order.

A step is: put what others need where they see it, and say `READY`; when all have, take what one needs from them, and
say `DONE`. A rank puts as many steps ahead as there are slots in its window, and never waits in doing so: waiting is
left to whoever needs a result. So a rank that is late holds nobody up who does not need it, and no order in which
ranks wait can block them.

Memory traffic is what it costs. Summands of this rank's own are read where they are; only what others read is copied
to the window, which is small enough to stay in caches; what lies in a shared segment anyway is not copied at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dthpc.comm.shared.room import DONE, READY, ExchangeError
from dthpc.comm.shared.segment import Segment
from dthpc.comm.shared.sums import sum_into

SLOTS = 8
"""Slots of a window: steps that a rank may be ahead of the one that lags most."""

WINDOW = 8 << 20
"""Bytes of a rank's window; less if many ranks share the host."""

ALL_WINDOWS = 256 << 20
"""Bytes of all windows of a group, at most."""

BLOCK = 1 << 18
"""Bytes that are added and handed on at a time where they lie in shared memory, so that they are read from a cache."""

_HEAD = 64
"""Bytes before a slot's data, as many as keep it aligned; they tell what it is, so that a mismatch is an error."""

LEAST = 1 << 14
"""Bytes of each rank's share from which more than two ranks add one share each, instead of each all of them."""

Place = Callable[[Tensor], None]
"""Puts something in a slot, given as its bytes."""

Take = Callable[[list[Tensor]], None]
"""Takes from the slots of all ranks, given as their bytes in order of the ranks."""


def window_bytes(ranks: int) -> int:
    """How large the window of each of some ranks is."""
    return max(64 << 10, min(WINDOW, ALL_WINDOWS // ranks)) // SLOTS * SLOTS


class Signals(Protocol):
    """How ranks tell each other how far they are; `Room` does it over sockets."""

    rank: int
    """This one's position."""

    size: int
    """How many there are."""

    peers: list[int]
    """The positions of the others."""

    def tell(self, signal: bytes) -> None:
        """Send `READY` or `DONE` to all others: what was written to memory before is theirs to read."""

    def look(self) -> None:
        """Take in the signals that have come, without waiting."""

    def has_ready(self, count: int) -> bool:
        """Whether each of the others has sent as many `READY` signals since the beginning, as far as was looked."""

    def has_done(self, count: int) -> bool:
        """The same for `DONE`."""

    def await_ready(self, count: int) -> None:
        """Wait until they have; raises `RankLost` if one will not."""

    def await_done(self, count: int) -> None:
        """The same for `DONE`."""

    def allocate(self, nbytes: int) -> Segment:
        """Memory that all ranks see, `nbytes` or a little more of each; collective."""


class Mismatch(ExchangeError):
    """Ranks called different collectives, or with tensors of different sizes."""


_NAMES = ("barrier", "all_gather", "reduce_scatter", "all_reduce")
_GATHER, _SCATTER, _REDUCE = range(1, 4)


@dataclass
class _Step:
    place: Place | None
    take: Take | None
    mark: int = 0
    """What it is, the same on all ranks: see `_mark`."""
    after: int = 0
    """How many steps must have been taken before this one is put; beside those that use its slot."""


class Ticket:
    """A collective on its way."""

    def __init__(self, exchange: Exchange, last: int, reads_mine: bool) -> None:
        """Take how many steps have been taken when it is complete, and whether others read the caller's tensors."""
        self._exchange, self._last, self._reads_mine = exchange, last, reads_mine

    def wait(self) -> None:
        """Return when the result is there, and the tensors may be changed."""
        self._exchange.advance(self._last)
        if self._reads_mine:
            self._exchange.await_others(self._last)

    def ready(self) -> bool:
        """Whether `wait` would not wait; takes what has come."""
        return self._exchange.try_advance(self._last, self._reads_mine)


class Exchange:
    """The collectives of one group; tensors are flat, contiguous, on the CPU."""

    recorded: bool
    """Whether its collectives count as ones of their own in the flight record, and not as part of another's."""

    def __init__(self, room: Signals, window: Segment, *, eager: bool = True) -> None:
        """Take a room.

        Args:
            room: the ranks.
            window: memory of theirs for what is on its way; the same size on all ranks.
            eager: whether the thread that starts a collective also puts what others need; else whoever asks for its
                result does.
        """
        self.eager = eager
        self.recorded = True
        self.room, self.rank, self.size = room, room.rank, room.size
        self._slot = window.nbytes // SLOTS - _HEAD
        windows = [window.of(rank).view(SLOTS, _HEAD + self._slot) for rank in range(room.size)]
        self._windows = [window[:, _HEAD:] for window in windows]
        self._marks = [[words(slot[:8]) for slot in window] for window in windows]
        self._steps: deque[_Step] = deque()
        self._segments: list[Segment] = []
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._added = self._placed = self._taken = 0
        # Who adds a collective must not wait for a thread that is moving data.
        self._order, self._lock = threading.Lock(), threading.RLock()

    # Memory ----------------------------------------------------------------------------------------------------------

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's window."""
        return SLOTS * (_HEAD + self._slot)

    def allocate(self, nbytes: int) -> Segment:
        """Memory that all ranks see; collective. Collectives on a tensor that lies in this rank's part of it, at the
        same place on all ranks, are made in place there.

        Raises:
            OSError: see `Room.allocate`.
        """
        with self._lock:
            self.advance(self._added)
            segment = self.room.allocate(nbytes)
            self._segments.append(segment)
            return segment

    def barrier(self) -> Ticket:
        """Complete when all ranks have started it."""
        with self._order:
            return self._add([_Step(None, None)])

    # Collectives -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def all_gather(self, shares: list[Tensor]) -> Ticket:
        """Give every rank this one's share, and get the others' into theirs; all of the same length."""
        mine = shares[self.rank]
        steps = []
        for low, high in self._pieces(mine.numel(), mine.element_size()):

            def place(slot: Tensor, low: int = low, high: int = high) -> None:
                _as(slot, mine.dtype, high - low).copy_(mine[low:high])

            def take(slots: list[Tensor], low: int = low, high: int = high) -> None:
                for peer in self.room.peers:
                    shares[peer][low:high].copy_(_as(slots[peer], mine.dtype, high - low))

            steps.append(_Step(place, take, _mark(_GATHER, mine)))
        with self._order:
            return self._add(steps)

    @torch.no_grad()
    def reduce_scatter(self, out: Tensor, shares: list[Tensor], add: bool) -> Ticket:
        """Sum the ranks' summands of this one's share into `out`; the order is this rank's, then those before it."""
        flat_views = self._shared(shares)
        if flat_views is not None:
            return self._reduce_in_place(out, shares, flat_views, add)
        dtype, mine = shares[self.rank].dtype, shares[self.rank]
        steps = []
        for low, high in self._pieces(mine.numel(), mine.element_size() * self.size):
            count = high - low

            def place(slot: Tensor, low: int = low, high: int = high, count: int = count) -> None:
                rows = _as(slot, dtype, self.size * count).view(self.size, count)
                for peer in self.room.peers:
                    rows[peer].copy_(shares[peer][low:high])

            def take(slots: list[Tensor], low: int = low, high: int = high, count: int = count) -> None:
                at = slice(self.rank * count, (self.rank + 1) * count)
                theirs = [_as(slots[peer], dtype, self.size * count)[at] for peer in self._before()]
                sum_into(out[low:high], [mine[low:high], *theirs], add)

            steps.append(_Step(place, take, _mark(_SCATTER, mine)))
        with self._order:
            return self._add(steps)

    @torch.no_grad()
    def all_reduce(self, flat: Tensor) -> Ticket:
        """Sum in place; all ranks get the same bits."""
        shares = list(flat.tensor_split(self.size))
        views = self._shared([flat])
        if views is not None:
            return self._add_in_place(views)
        if self.size == 2 or flat.nbytes < self.size * LEAST:
            return self._add_all(flat)
        return self._add_shares(flat, shares)

    def _add_all(self, flat: Tensor) -> Ticket:
        """Every rank adds everything."""
        steps = []
        for low, high in self._pieces(flat.numel(), flat.element_size()):

            def place(slot: Tensor, low: int = low, high: int = high) -> None:
                _as(slot, flat.dtype, high - low).copy_(flat[low:high])

            def take(slots: list[Tensor], low: int = low, high: int = high) -> None:
                mine = flat[low:high]
                if self.size == 2:
                    mine.add_(_as(slots[1 - self.rank], flat.dtype, high - low))
                    return
                sum_into(mine, [_as(slot, flat.dtype, high - low) for slot in slots], False)

            steps.append(_Step(place, take, _mark(_REDUCE, flat)))
        with self._order:
            return self._add(steps)

    def _add_shares(self, flat: Tensor, shares: list[Tensor]) -> Ticket:
        """Every rank adds its share, and gives the others the sum."""
        longest, mark = shares[0].numel(), _mark(_REDUCE, flat)
        with self._order:
            steps: list[_Step] = []
            for low, high in self._pieces(longest, flat.element_size() * self.size):
                pieces = [share[low:high] for share in shares]
                count = high - low

                def place(slot: Tensor, pieces: list[Tensor] = pieces, count: int = count) -> None:
                    for peer in self.room.peers:
                        _as(slot, flat.dtype, self.size * count)[peer * count :][: len(pieces[peer])].copy_(
                            pieces[peer]
                        )

                def take(slots: list[Tensor], pieces: list[Tensor] = pieces, count: int = count) -> None:
                    mine = pieces[self.rank]
                    start = self.rank * count
                    whole = [_as(slot, flat.dtype, self.size * count) for slot in slots]
                    theirs = [whole[peer][start : start + len(mine)] for peer in self._before()]
                    sum_into(mine, [mine, *theirs], False)

                def give(slot: Tensor, pieces: list[Tensor] = pieces) -> None:
                    mine = pieces[self.rank]
                    _as(slot, flat.dtype, len(mine)).copy_(mine)

                def get(slots: list[Tensor], pieces: list[Tensor] = pieces) -> None:
                    for peer in self.room.peers:
                        pieces[peer].copy_(_as(slots[peer], flat.dtype, len(pieces[peer])))

                steps.append(_Step(place, take, mark))
                steps.append(_Step(give, get, mark, after=self._added + len(steps)))
            return self._add(steps)

    def _add_in_place(self, views: list[list[Tensor]]) -> Ticket:
        """Every rank adds its share where it lies, and writes the sum to all."""
        (flats,) = views

        def take(_: list[Tensor]) -> None:
            mine = [flat.tensor_split(self.size)[self.rank] for flat in flats]
            length = BLOCK // mine[0].element_size()
            for low in range(0, len(mine[0]), length):
                blocks = [one[low : low + length] for one in mine]
                own = blocks[self.rank]
                sum_into(own, [own, *(blocks[peer] for peer in self._before())], False)
                for peer in self.room.peers:
                    blocks[peer].copy_(own)

        with self._order:
            return self._add([_Step(None, take)], reads_mine=True)

    def _reduce_in_place(self, out: Tensor, shares: list[Tensor], views: list[list[Tensor]], add: bool) -> Ticket:
        def take(_: list[Tensor]) -> None:
            mine = views[self.rank]
            sum_into(out, [mine[self.rank], *(mine[peer] for peer in self._before())], add)

        with self._order:
            return self._add([_Step(None, take)], reads_mine=True)

    # Progress --------------------------------------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Wait until as many steps have been taken since the beginning.

        Raises:
            Mismatch: another rank called something else.
            RankLost: one has ended, or did not take part in time.
        """
        with self._lock:
            while self._taken < count:
                self._place_ahead()
                if self._placed == self._taken:
                    # It has no slot yet: who lags has to take what is in there.
                    self.room.await_done(self._placed + 1 - SLOTS)
                    continue
                self.room.await_ready(self._taken + 1)
                self._take()

    def try_advance(self, count: int, others: bool) -> bool:
        """Take what can be taken without waiting; returns whether as many steps have been, by the others too."""
        with self._lock:
            self.room.look()
            while self._taken < self._added:
                self._place_ahead()
                if self._placed == self._taken or not self.room.has_ready(self._taken + 1):
                    break
                self._take()
            return self._taken >= count and (not others or self.room.has_done(count))

    def await_others(self, count: int) -> None:
        """Wait until the others have taken as many steps."""
        with self._lock:
            self.room.await_done(count)

    def _add(self, steps: list[_Step], reads_mine: bool = False) -> Ticket:
        self._steps.extend(steps)
        self._added += len(steps)
        if self.eager:
            with self._lock:
                self._place_ahead()
        return Ticket(self, self._added, reads_mine)

    def _place_ahead(self) -> None:
        """Put the next steps where others see them, as far as that goes without waiting."""
        room, placed = self.room, self._placed
        while placed < self._added:
            step = self._steps[placed - self._taken]
            # A rank, too, may still have to read its own slot.
            if step.after > self._taken or placed - self._taken >= SLOTS:
                break
            if not room.has_done(placed + 1 - SLOTS):
                room.look()
                if not room.has_done(placed + 1 - SLOTS):
                    break
            self._marks[self.rank][placed % SLOTS][0] = step.mark
            if step.place is not None:
                # Whichever thread it is, and whether or not autograd follows what is put.
                with torch.no_grad():
                    step.place(self._windows[self.rank][placed % SLOTS])
            placed += 1
            room.tell(READY)
        self._placed = placed

    @torch.no_grad()
    def _take(self) -> None:
        step, slot = self._steps[0], self._taken % SLOTS
        for peer in self.room.peers:
            if self._marks[peer][slot][0] != step.mark:
                raise self._mismatch(peer, self._marks[peer][slot][0], step.mark)
        if step.take is not None:
            step.take([window[slot] for window in self._windows] if step.place is not None else [])
        self._steps.popleft()
        self._taken += 1
        self.room.tell(DONE)

    def _mismatch(self, peer: int, theirs: int, mine: int) -> Mismatch:
        called, said = (f"{_NAMES[mark % 4]} of {mark // 4} bytes" for mark in (mine, theirs))
        return Mismatch(
            f"rank {self.rank} of the group is in {called}, and rank {peer} in {said}: operations or sizes differ"
        )

    def _before(self) -> list[int]:
        """The other ranks, from the one before this one backwards."""
        return [(self.rank - distance) % self.size for distance in range(1, self.size)]

    def _pieces(self, count: int, nbytes: int) -> list[tuple[int, int]]:
        """Ranges of `count` elements that fit a slot, at `nbytes` of it for each."""
        most = max(1, self._slot // nbytes)
        return [(low, min(low + most, count)) for low in range(0, count, most)]

    def _shared(self, mine: list[Tensor]) -> list[list[Tensor]] | None:
        """For each tensor those of all ranks at the same place of a segment; None where one lies in none."""
        found = []
        for tensor in mine:
            everywhere = self._everywhere(tensor)
            if everywhere is None:
                return None
            found.append(everywhere)
        return found

    def _everywhere(self, tensor: Tensor) -> list[Tensor] | None:
        if not self._segments:
            return None
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype
        known = self._views.get(key)
        if known is not None:
            return known
        for segment in self._segments:
            at = segment.offset(tensor, self.rank)
            if at is not None:
                parts = [segment.of(rank).narrow(0, at, tensor.nbytes) for rank in range(self.size)]
                self._views[key] = [part.view(tensor.dtype) for part in parts]
                return self._views[key]
        return None


def words(memory: Tensor) -> memoryview:
    """Bytes as integers of 64 bits, read and written each at once."""
    return memoryview(cast(Any, memory.numpy())).cast("B").cast("q")


def _mark(kind: int, tensor: Tensor) -> int:
    return tensor.nbytes * 4 + kind


def _as(slot: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The beginning of some bytes as elements, `[count]`."""
    return slot[: count * dtype.itemsize].view(dtype)
