"""MPI by mpi4py on NumPy buffers, as osu-micro-benchmarks call it.

Only for ranks that an MPI launcher has started: importing mpi4py may abort others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dthpc.jobs.collectives.buffers import Case
from dthpc.jobs.collectives.drivers import Call, MessageDriver

NUMPY_DTYPES = ("fp64", "fp32", "int64", "int32", "int8", "uint8")
"""What NumPy and MPI both have."""

_IN_PLACE_NEVER = ("barrier", "send_recv", "sendrecv", "ping_pong")


class RawMpiDriver(MessageDriver):
    """The upper-case methods of a communicator, blocking."""

    name = "raw_mpi"

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Split the communicator of all ranks; collective over all of them.

        Args:
            ranks: of this rank's group.
            rank: of the world.
        """
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Split(ranks[0], ranks.index(rank))
        self._comm.Barrier()  # connections are made while ranks are inside of MPI

    def forms(self, operation: str) -> tuple[bool, ...]:
        if operation == "broadcast":
            return (True,)
        return (False,) if operation in _IN_PLACE_NEVER else (False, True)

    def call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        mpi, comm = self._mpi, self._comm
        op = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}[case.redop]
        source, target = operand.numpy(), result.numpy()
        root = case.rank == 0
        here: Any = mpi.IN_PLACE
        if case.operation == "all_reduce":
            given = here if case.in_place else source
            return lambda: comm.Allreduce(given, target, op)
        if case.operation == "all_gather":
            given = here if case.in_place else source
            return lambda: comm.Allgather(given, target)
        if case.operation == "reduce_scatter":
            return self._reduce_scatter(case, operand, result, op)
        if case.operation == "broadcast":
            return lambda: comm.Bcast(target, 0)
        if case.operation == "reduce":
            given, kept = (here if case.in_place and root else source), (target if root else None)
            return lambda: comm.Reduce(given, kept, op, 0)
        if case.operation == "gather":
            given, kept = (here if case.in_place and root else source), (target if root else None)
            return lambda: comm.Gather(given, kept, 0)
        if case.operation == "scatter":
            given, kept = (source if root else None), (here if case.in_place and root else target)
            return lambda: comm.Scatter(given, kept, 0)
        if case.operation == "all_to_all":
            given = here if case.in_place else source
            return lambda: comm.Alltoall(given, target)
        return self.barrier if case.operation == "barrier" else self.point_to_point(case, operand, result)

    def _reduce_scatter(self, case: Case, operand: Tensor, result: Tensor, op: Any) -> Call:
        comm = self._comm
        if not case.in_place:
            source, target = operand.numpy(), result.numpy()
            return lambda: comm.Reduce_scatter_block(source, target, op)
        # MPI leaves the share of every rank at the beginning of its buffer, and torch at the rank's place in it.
        whole, first = operand.numpy(), operand[: case.count]

        def in_place() -> None:
            comm.Reduce_scatter_block(self._mpi.IN_PLACE, whole, op)
            if case.rank:
                result.copy_(first)

        return in_place

    def barrier(self) -> None:
        self._comm.Barrier()

    def send(self, tensor: Tensor, peer: int) -> None:
        self._comm.Send(tensor.numpy(), peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        self._comm.Recv(tensor.numpy(), peer)

    def exchange(self, operand: Tensor, result: Tensor, peer: int) -> None:
        self._comm.Sendrecv(operand.numpy(), peer, recvbuf=result.numpy(), source=peer)

    def close(self) -> None:
        self._comm.Free()
