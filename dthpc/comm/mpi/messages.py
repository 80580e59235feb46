"""Messages between two ranks, and the barrier that names who is missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dthpc.comm.mpi.buffers import Buffers
from dthpc.comm.mpi.operation import Request, Steps

_OWN_TAGS = 16
"""Tags at the upper end that are ours."""


class Messages:
    """Sends and receives over a communicator."""

    def __init__(self, mpi: Any, comm: Any, buffers: Buffers) -> None:
        self._mpi, self._comm, self._buffers = mpi, comm, buffers
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._tags = int(comm.Get_attr(mpi.TAG_UB) or 32767) - _OWN_TAGS
        self.collective_tag = self._tags + 1
        self._arrive, self._depart = self._tags + 2, self._tags + 3

    def check_tag(self, tag: int) -> None:
        """Refuse a tag that MPI can't carry."""
        if not 0 <= tag <= self._tags:
            raise ValueError(f"tag {tag} is outside 0 … {self._tags}, which this MPI library carries")

    def send(self, tensor: Tensor, peer: int, tag: int) -> Steps:
        """Send a tensor."""
        source = self._buffers.readable(tensor)
        datatype = self._buffers.moved(source)
        pieces = self._buffers.pieces(source)
        yield [self._comm.Isend(self._buffers.spec(piece, datatype), peer, tag) for piece in pieces]

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Steps:
        """Receive a tensor of exactly this size, from a peer, or from any for None; returns the sender."""
        room = self._buffers.writable(tensor)
        datatype = self._buffers.moved(room)
        pieces = self._buffers.pieces(room)
        if peer is None and len(pieces) > 1:
            raise ValueError("from any source, this MPI library receives less than 2^31 elements")
        source = self._mpi.ANY_SOURCE if peer is None else peer
        arrivals = [
            Arrival(self._mpi, self._comm.Irecv(self._buffers.spec(piece, datatype), source, tag)) for piece in pieces
        ]
        yield arrivals
        came = sum(arrival.bytes for arrival in arrivals)
        if came != room.nbytes:
            raise ValueError(f"sizes do not fit: {came} bytes came from rank {arrivals[0].source} of the group, and "
                             f"{room.nbytes} were to be received")  # fmt: skip
        self._buffers.deliver(room, tensor)
        return arrivals[0].source

    def monitored_barrier(self, timeout_s: float, all_ranks: bool) -> Steps:
        """A barrier through rank 0, which knows who came; returns the group's ranks that did not, on all that did.

        Args:
            timeout_s: seconds that rank 0 waits for the others.
            all_ranks: whether rank 0 names all that are missing, and not only the first.
        """
        word = torch.zeros(self._size + 1, dtype=torch.uint8)
        spec = self._buffers.spec(word, self._mpi.UINT8_T)
        if self._rank != 0:
            # Two requests at once, so that the answer is waited for from the beginning.
            yield [
                self._comm.Isend([None, 0, self._mpi.BYTE], 0, self._arrive),
                self._comm.Irecv(spec, 0, self._depart),
            ]
            return [rank for rank in range(self._size) if word[rank]]
        pending = {
            peer: self._comm.Irecv([None, 0, self._mpi.BYTE], peer, self._arrive) for peer in range(1, self._size)
        }
        yield [_Until(list(pending.values()), time.monotonic() + timeout_s)]
        missing = [peer for peer, request in pending.items() if not request.Test()]
        for peer in missing:
            pending[peer].Cancel()
        named = missing if all_ranks else missing[:1]
        word[named] = 1
        yield [self._comm.Isend(spec, peer, self._depart) for peer in pending if peer not in missing]
        return named


class Arrival:
    """A receive, with what came."""

    def __init__(self, mpi: Any, request: Any) -> None:
        self._mpi, self._request = mpi, request
        self._status = mpi.Status()
        self._done = False

    def Test(self) -> bool:
        """Whether the message is there."""
        if not self._done:
            self._done = bool(self._request.Test(self._status))
        return self._done

    @property
    def source(self) -> int:
        """The group's rank that sent it."""
        return int(self._status.Get_source())

    @property
    def bytes(self) -> int:
        """Size of the message."""
        return int(self._status.Get_count(self._mpi.BYTE))


class _Until:
    """Requests that are waited for until a time, and no longer."""

    def __init__(self, requests: Sequence[Request], limit: float) -> None:
        self._requests, self._limit = list(requests), limit

    def Test(self) -> bool:
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests or time.monotonic() > self._limit
