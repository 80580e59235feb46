"""Collectives on flat tensors, each in the form that its backend does fastest.

Gloo makes a reduce-scatter out of an all-reduce, and its all-gather copies twice: for 16 MB on 2 ranks they take 11.9
and 5.6 ms, on 4 ranks that share two cores 46.8 and 24.1 ms. Sending every peer its share, receiving the others' and
adding them takes 3.6 and 4.0 ms, or 14.7 and 4.8 ms. As many bytes cross the wire as in a ring, in one round of
messages rather than size - 1. Ranks of one host need no wire (`dthpc.comm.shared`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.shared.exchange import Exchange, Ticket
from dthpc.comm.shared.sums import sum_into


class BufferPool:
    """Uninitialised flat tensors that are used again, because fresh pages cost as much as filling them does.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._lent = 0

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor `[elements]` of any contents."""
        with self._lock:
            self._lent += elements * dtype.itemsize
            free = self._free.get((elements, dtype, device))
            if free:
                return free.pop()
        return torch.empty(elements, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a tensor that was taken."""
        with self._lock:
            self._lent -= buffer.nbytes
            self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), []).append(buffer)

    def clear(self) -> None:
        """Let go of the tensors that are not in use."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in use or not."""
        return self._lent + sum(buffer.nbytes for free in self._free.values() for buffer in free)


# Messages of a pair of ranks match by tag and, within a tag, by order. Ours have tags of their own, so that they cannot
# meet those that somebody else sends over the same group.
_SCATTER, _GATHER, _SWAP = 1, 2, 3

_LEAST = 1024
"""Elements of each rank's share below which Gloo's own all-reduce, in fewer messages, is as fast."""


class Pending:
    """A collective on its way, in one phase or two; `wait` may be called once."""

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], None] | None = None,
        second: Callable[[], Pending] | None = None,
    ) -> None:
        """Take what is under way.

        Args:
            works: have a `wait`.
            finish: is called after those.
            second: starts the second phase after that; None: there is none.
        """
        self._works = works
        self._finish = finish
        self._second = second
        self._advanced = False
        self._calls: list[Callable[[], None]] = []

    def advance(self) -> None:
        """Wait for the first phase, and start the second if there is one.

        Ranks may call it at different times, but for all pending collectives of a group in the same order.
        """
        if self._advanced:
            return
        self._advanced = True
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works = [self._second()] if self._second is not None else []

    def ready(self) -> bool:
        """Whether `wait` would return at once; what comes over memory is taken by asking."""
        return self._second is None and all(isinstance(work, Ticket) and work.ready() for work in self._works)

    def wait(self) -> None:
        """Return when the result is there."""
        self.advance()
        for work in self._works:
            work.wait()
        for call in self._calls:
            call()

    def then(self, call: Callable[[], None]) -> Pending:
        """Have something done at the end of `wait`; returns the same object."""
        self._calls.append(call)
        return self


class Channel:
    """The collectives of one group of ranks.

    All are asynchronous: tensors must be contiguous, and be left alone until `wait` returns. Ranks start them in the
    same order.
    """

    def __init__(
        self, group: dist.ProcessGroup, pool: BufferPool | None = None, exchange: Exchange | None = None
    ) -> None:
        """Take a group.

        Args:
            group: the ranks.
            pool: where to take room for what other ranks send; None: one of its own.
            exchange: the same ranks' way over memory, in the same order; None: they use the group's transport.
        """
        self.group = group
        self.exchange = exchange
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.on_host = dist.get_backend(group) == "gloo"
        self._pool = pool if pool is not None else BufferPool()

    def all_reduce(self, flat: Tensor) -> Pending:
        """Sum `[n]` in place; all ranks get the same bits.

        With Gloo it is a reduce-scatter, whose second phase gathers the sums; between two ranks, an exchange of all
        summands, which takes as many bytes. Over memory it is made in place if `flat` lies in the exchange's.
        """
        if self.exchange is not None:
            return Pending([self.exchange.all_reduce(flat)])
        if not self.on_host or flat.numel() < self.size * _LEAST:
            return Pending([dist.all_reduce(flat, group=self.group, async_op=True)])
        if self.size == 2:
            theirs = self._pool.take(flat.numel(), flat.dtype, flat.device)
            return Pending(self._trade(flat, theirs, 1 - self.rank, _SWAP), lambda: self._add(flat, theirs))
        shares = list(flat.tensor_split(self.size))
        first = self._exchange_and_add(shares[self.rank], shares, False)
        return Pending([first], second=lambda: self._exchange_shares(shares))

    def all_gather(self, out: Tensor, mine: Tensor) -> Pending:
        """Concatenate the ranks' `mine` `[n]` into `out` `[size · n]`; `mine` may be this rank's slice of `out`."""
        if not self.on_host and self.exchange is None:
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return Pending([gather(out, mine, group=self.group, async_op=True)])
        shares = list(out.chunk(self.size))
        if shares[self.rank].data_ptr() != mine.data_ptr():
            shares[self.rank].copy_(mine)
        if self.exchange is not None:
            return Pending([self.exchange.all_gather(shares)])
        return self._exchange_shares(shares)

    def reduce_scatter(self, out: Tensor, flat: Tensor, *, add: bool = False) -> Pending:
        """Sum `flat` `[size · n]`, of which this rank gets its n elements in `out`.

        The order of the sum is fixed, so it does not depend on timing; with Gloo, or over memory, it is taken in fp32
        and rounded once.

        Args:
            out: `[n]`; may be this rank's slice of `flat`, and may be of a wider dtype than `flat`.
            flat: this rank's summands.
            add: whether `out` keeps what it holds, and the sum is added.
        """
        if self.exchange is not None:
            return Pending([self.exchange.reduce_scatter(out, list(flat.chunk(self.size)), add)])
        if self.on_host:
            return self._exchange_and_add(out, list(flat.chunk(self.size)), add)
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        if not add and out.dtype == flat.dtype:
            return Pending([scatter(out, flat, group=self.group, async_op=True)])
        total = self._pool.take(out.numel(), flat.dtype, flat.device)

        def deliver() -> None:
            out.add_(total) if add else out.copy_(total)
            self._pool.give(total)

        return Pending([scatter(total, flat, group=self.group, async_op=True)], deliver)

    def swap(self, theirs: Tensor, mine: Tensor, peer: int) -> Pending:
        """Send `mine` to a peer, given by its position in the group, and receive its like in `theirs`."""
        if self.on_host:
            return Pending(self._trade(mine, theirs, peer, _SWAP))
        both = [
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
        ]
        return Pending(dist.batch_isend_irecv(both))

    def _trade(self, mine: Tensor, theirs: Tensor, peer: int, tag: int) -> list[Any]:
        # The group's own methods, as there may be hundreds of messages in a step.
        group: Any = self.group
        return [group.send([mine], peer, tag), group.recv([theirs], peer, tag)]

    def _exchange_shares(self, shares: list[Tensor]) -> Pending:
        """Give every rank this one's share, and get the others'."""
        group: Any = self.group
        works: list[Any] = []
        for distance in range(1, self.size):
            target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            works.append(group.send([shares[self.rank]], target, _GATHER))
            works.append(group.recv([shares[source]], source, _GATHER))
        return Pending(works)

    def _exchange_and_add(self, out: Tensor, shares: list[Tensor], add: bool) -> Pending:
        """Give every rank its share of this one's summands, and add what the others give."""
        group: Any = self.group
        mine = shares[self.rank]
        received: list[Tensor] = []
        works: list[Any] = []
        for distance in range(1, self.size):
            target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            received.append(self._pool.take(mine.numel(), mine.dtype, mine.device))
            works.append(group.send([shares[target]], target, _SCATTER))
            works.append(group.recv([received[-1]], source, _SCATTER))

        def sum_up() -> None:
            sum_into(out, [mine, *received], add)
            for buffer in received:
                self._pool.give(buffer)

        return Pending(works, sum_up)

    def _add(self, flat: Tensor, theirs: Tensor) -> None:
        flat.add_(theirs)
        self._pool.give(theirs)
