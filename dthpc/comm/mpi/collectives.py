"""The collectives of one communicator, as steps that start MPI's non-blocking calls.

Tensors may be non-contiguous, of any dtype, on the CPU or a GPU: what MPI can't take where it is goes through a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dthpc.comm.mpi.buffers import Buffers, adjacent
from dthpc.comm.mpi.operation import Request, Steps
from dthpc.comm.mpi.sizes import fits, same_dtype


class Collectives:
    """Moves tensors between the ranks of a communicator; reductions are in `Reducers`."""

    def __init__(self, mpi: Any, comm: Any, buffers: Buffers, tag: int) -> None:
        """Take a communicator.

        Args:
            mpi: the module `mpi4py.MPI`.
            comm: the communicator, for these collectives only.
            buffers: makes buffers out of tensors.
            tag: for messages of this class's own.
        """
        self.mpi, self.comm, self.buffers = mpi, comm, buffers
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._tag = tag

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Give all ranks the root's tensor."""
        sends = self.rank == root
        buffer = self.buffers.readable(tensor) if sends else self.buffers.writable(tensor)
        datatype = self.buffers.moved(buffer)
        yield [self.comm.Ibcast(self.buffers.spec(piece, datatype), root) for piece in self.buffers.pieces(buffer)]
        if not sends:
            self.buffers.deliver(buffer, tensor)

    def all_gather(self, out: Tensor, mine: Tensor) -> Steps:
        """Concatenate the ranks' `mine`, each of n elements, in `out`, of size · n."""
        same_dtype([out, mine])
        fits(out.numel() == self.size * mine.numel(), f"output has {out.numel()} elements, {self.size} inputs of "
              f"{mine.numel()} are gathered")  # fmt: skip
        room, source = self.buffers.writable(out), self.buffers.readable(mine)
        share = source.numel() * source.element_size()
        if self.too_many(room):
            yield self._exchange([source] * self.size, list(room.view(-1).chunk(self.size)))
        else:
            datatype = self.buffers.moved(source)
            in_place = share > 0 and source.data_ptr() == room.data_ptr() + self.rank * share
            send = self.mpi.IN_PLACE if in_place else self.buffers.spec(source, datatype)
            receive = [self.buffers.spec(room, datatype)[0], source.numel(), datatype]
            yield [self.comm.Iallgather(send, receive)]
        self.buffers.deliver(room, out)

    def all_gather_uneven(self, outs: Sequence[Tensor], mine: Tensor) -> Steps:
        """Give all ranks the ranks' `mine`, one tensor each, of any sizes that `outs` has too."""
        same_dtype([*outs, mine])
        fits(outs[self.rank].numel() == mine.numel(), f"input has {mine.numel()} elements, its output "
              f"{outs[self.rank].numel()}")  # fmt: skip
        source = self.buffers.readable(mine)
        room, parts = self.parts(outs)
        if self.too_many(room):
            yield self._exchange([source] * self.size, parts)
        else:
            datatype, counts = self.buffers.moved(source), [part.numel() for part in parts]
            if source.data_ptr() == parts[self.rank].data_ptr():
                source = source.clone()
            receive = self.buffers.spec_v(room, counts, datatype)
            yield [self.comm.Iallgatherv(self.buffers.spec(source, datatype), receive)]
        self._deliver(parts, outs)

    def gather(self, outs: Sequence[Tensor] | None, mine: Tensor, root: int) -> Steps:
        """Give the root the ranks' `mine`, one tensor each; `outs` is None elsewhere."""
        source = self.buffers.readable(mine)
        if self.rank != root or outs is None:
            yield from self._send_only(source, root)
            return
        same_dtype([*outs, mine])
        requests, rooms = [], []
        for peer, out in enumerate(outs):
            if peer == self.rank:
                out.copy_(mine.view(out.shape) if mine.shape != out.shape else mine)
                continue
            room = self.buffers.writable(out)
            rooms.append((room, out))
            requests += self._receive(room, peer)
        yield requests
        for room, out in rooms:
            self.buffers.deliver(room, out)

    def scatter(self, out: Tensor, shares: Sequence[Tensor] | None, root: int) -> Steps:
        """Give every rank its one of the root's tensors; `shares` is None elsewhere."""
        if self.rank == root and shares is not None:
            same_dtype([*shares, out])
            fits(shares[root].numel() == out.numel(), "the root's own share and its output differ in size")
            # Named, because MPI reads them until the end and does not keep them.
            sources = [self.buffers.readable(share) for share in shares]
            yield [r for peer, source in enumerate(sources) if peer != root for r in self._send(source, peer)]
            out.copy_(shares[root].view(out.shape) if shares[root].shape != out.shape else shares[root])
            return
        room = self.buffers.writable(out)
        yield self._receive(room, root)
        self.buffers.deliver(room, out)

    def all_to_all(self, outs: Sequence[Tensor], shares: Sequence[Tensor]) -> Steps:
        """Give every rank one tensor of this rank's, of any size, and get one of each."""
        same_dtype([*outs, *shares])
        room, parts = self.parts(outs)
        given, sources = self.parts(shares)
        for source, share in zip(sources, shares, strict=True):
            if source is not share:
                source.copy_(share)
        yield self._all_to_all(room, given, [part.numel() for part in parts], [source.numel() for source in sources])
        self._deliver(parts, outs)

    def all_to_all_single(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], splits: Sequence[int]) -> Steps:
        """The same with the parts of one tensor, whose first dimension is split so; no splits: equally."""
        same_dtype([out, flat])
        out_counts, counts = self._counts(out, out_splits), self._counts(flat, splits)
        room, source = self.buffers.writable(out), self.buffers.readable(flat)
        if splits or out_splits or self.too_many(room):
            yield self._all_to_all(room, source, out_counts, counts)
        else:
            datatype = self.buffers.moved(room)
            # mpi4py wants the count of one rank's part.
            given, taken = ([*self.buffers.spec(each, datatype)[:1], counts[0], datatype] for each in (source, room))
            yield [self.comm.Ialltoall(given, taken)]
        self.buffers.deliver(room, out)

    def barrier(self) -> Steps:
        """Return when all ranks have come."""
        yield [self.comm.Ibarrier()]

    # --- parts ------------------------------------------------------------------------------------------------------

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A flat buffer and its consecutive parts for tensors: over themselves where they lie so."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.buffers.writable(tensor)  # waits for what the GPU still does with it
        flat = adjacent(tensors) if all(self.buffers.direct(tensor) for tensor in tensors) else None
        if flat is not None:
            return flat, list(tensors)
        flat = self.buffers.room(tensors[0], sum(tensor.numel() for tensor in tensors))
        parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
        return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _deliver(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            self.buffers.deliver(part, tensor)

    def _counts(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            fits(rows % self.size == 0, f"the first dimension, {rows}, is not divisible by the {self.size} ranks")
            return [tensor.numel() // self.size] * self.size
        fits(len(splits) == self.size and sum(splits) == rows, f"splits {list(splits)} of {rows} rows")
        row = tensor.numel() // rows if rows else 0
        return [split * row for split in splits]

    def _all_to_all(self, room: Tensor, given: Tensor, out_counts: list[int], counts: list[int]) -> list[Request]:
        own = self.rank
        fits(out_counts[own] == counts[own], f"this rank's share for itself has {counts[own]} elements, its output "
              f"{out_counts[own]}")  # fmt: skip
        if self.too_many(room) or self.too_many(given):
            return self._exchange(given.view(-1).split_with_sizes(counts), room.view(-1).split_with_sizes(out_counts))
        datatype = self.buffers.moved(room)
        send, receive = self.buffers.spec_v(given, counts, datatype), self.buffers.spec_v(room, out_counts, datatype)
        return [self.comm.Ialltoallv(send, receive)]

    def too_many(self, tensor: Tensor) -> bool:
        """Whether counts or displacements would not fit into the library's integers."""
        return self.buffers.most is not None and tensor.numel() > self.buffers.most

    def _exchange(self, shares: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Request]:
        """Send each rank its share and receive one of each, as messages of counts that any library takes."""
        requests: list[Request] = []
        for distance in range(1, self.size):
            requests += self._receive(outs[(self.rank - distance) % self.size], (self.rank - distance) % self.size)
        for distance in range(1, self.size):
            requests += self._send(shares[(self.rank + distance) % self.size], (self.rank + distance) % self.size)
        own, share = outs[self.rank].view(-1), shares[self.rank].reshape(-1)
        if own.data_ptr() != share.data_ptr():
            own.copy_(share)
        return requests

    def _send_only(self, source: Tensor, peer: int) -> Steps:
        yield self._send(source, peer)

    def _send(self, source: Tensor, peer: int) -> list[Request]:
        datatype = self.buffers.moved(source)
        pieces = self.buffers.pieces(source)
        return [self.comm.Isend(self.buffers.spec(piece, datatype), peer, self._tag) for piece in pieces]

    def _receive(self, room: Tensor, peer: int) -> list[Request]:
        datatype = self.buffers.moved(room)
        pieces = self.buffers.pieces(room)
        return [self.comm.Irecv(self.buffers.spec(piece, datatype), peer, self._tag) for piece in pieces]


def together(parts: Sequence[Steps]) -> Steps:
    """Several operations at once: their first steps, then their second ones, and so on."""
    return parts[0] if len(parts) == 1 else _all_of(parts)


def _all_of(running: Sequence[Steps]) -> Steps:
    while running:
        requests: list[Request] = []
        going = []
        for steps in running:
            started = next(steps, None)
            if started is not None:
                requests += started
                going.append(steps)
        running = going
        if running:
            yield requests
