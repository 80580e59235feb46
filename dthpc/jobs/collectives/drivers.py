"""The libraries under measurement behind one interface: each makes a blocking call of a case, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.collectives import Pending
from dthpc.jobs.collectives.buffers import Case, split

Call = Callable[[], None]


def _first_of(*names: str) -> Any:
    """The first of several functions of torch.distributed that this version has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


class Driver(ABC):
    """One library in one group."""

    name: str
    """As in `job.backends`."""

    @abstractmethod
    def forms(self, operation: str) -> tuple[bool, ...]:
        """The forms that it has of an operation: False for results in other memory, True in place."""

    @abstractmethod
    def call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        """What does the operation and returns when this rank's part is done.

        Args:
            case: what to do.
            operand: as `Arena.lend` gives it.
            result: likewise.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks of the group have come here."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what was made for the measurement."""


class MessageDriver(Driver):
    """One that also sends messages between two ranks."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> None:
        """Send to a rank of the group; returns when the tensor may be written again."""

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int) -> None:
        """Receive from a rank of the group."""

    @abstractmethod
    def exchange(self, operand: Tensor, result: Tensor, peer: int) -> None:
        """Send and receive at once."""

    def point_to_point(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        """Messages between the halves of the group; who has no partner looks on."""
        peer = case.partner
        if peer is None:
            return lambda: None
        if case.operation == "sendrecv":
            return lambda: self.exchange(operand, result, peer)
        if case.operation == "send_recv":
            return (lambda: self.send(operand, peer)) if case.is_first_half else (lambda: self.receive(result, peer))
        return self._ping_pong(operand, result, peer, case.is_first_half)

    def _ping_pong(self, operand: Tensor, result: Tensor, peer: int, begins: bool) -> Call:
        def ping() -> None:
            self.send(operand, peer)
            self.receive(result, peer)

        def pong() -> None:
            self.receive(result, peer)
            self.send(operand, peer)

        return ping if begins else pong


_IN_PLACE_ONLY = ("all_reduce", "broadcast", "reduce")
_IN_PLACE_NEVER = ("all_to_all", "barrier", "send_recv", "sendrecv", "ping_pong")


def _torch_forms(operation: str) -> tuple[bool, ...]:
    if operation in _IN_PLACE_ONLY:
        return (True,)
    return (False,) if operation in _IN_PLACE_NEVER else (False, True)


class TorchDriver(MessageDriver):
    """torch.distributed over any of its backends."""

    def __init__(self, name: str, group: dist.ProcessGroup, owned: bool, device: torch.device) -> None:
        """Take a group.

        Args:
            name: as in `job.backends`.
            group: the ranks.
            owned: whether the group was made for this, so that it ends with it.
            device: where tensors lie; a GPU's work is waited for.
        """
        self.name, self._group, self._owned = name, group, owned
        self._finish: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._waits = device.type == "cuda"
        self._gather = _first_of("all_gather_single", "all_gather_into_tensor")
        self._scatter = _first_of("reduce_scatter_single", "reduce_scatter_tensor")

    def forms(self, operation: str) -> tuple[bool, ...]:
        return _torch_forms(operation)

    def call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        do = self._call(case, operand, result)
        if not self._waits:
            return do

        def finished() -> None:
            do()
            self._finish()

        return finished

    def _call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        group: Any = self._group
        op: Any = getattr(dist.ReduceOp, case.redop.upper())
        root = case.rank == 0
        if case.operation == "all_reduce":
            return lambda: dist.all_reduce(result, op, group)
        if case.operation == "all_gather":
            return lambda: self._gather(result, operand, group=group)
        if case.operation == "reduce_scatter":
            return lambda: self._scatter(result, operand, op, group=group)
        if case.operation == "broadcast":
            return lambda: dist.broadcast(result, group=group, group_src=0)
        if case.operation == "reduce":
            return lambda: dist.reduce(result, op=op, group=group, group_dst=0)
        if case.operation == "gather":
            parts = split(result, case.count) if root else None
            return lambda: dist.gather(operand, parts, group=group, group_dst=0)
        if case.operation == "scatter":
            shares = split(operand, case.count) if root else None
            return lambda: dist.scatter(result, shares, group=group, group_src=0)
        if case.operation == "all_to_all":
            return lambda: dist.all_to_all_single(result, operand, group=group)
        return self.barrier if case.operation == "barrier" else self.point_to_point(case, operand, result)

    def barrier(self) -> None:
        dist.barrier(self._group)

    def send(self, tensor: Tensor, peer: int) -> None:
        dist.send(tensor, group=self._group, group_dst=peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        dist.recv(tensor, group=self._group, group_src=peer)

    def exchange(self, operand: Tensor, result: Tensor, peer: int) -> None:
        both = [
            dist.P2POp(dist.isend, operand, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, result, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def close(self) -> None:
        if self._owned:
            dist.destroy_process_group(self._group)


class RawGlooDriver(MessageDriver):
    """torch's Gloo process group, called without torch.distributed's front: what that adds is the difference."""

    name = "raw_gloo"

    def __init__(self, store: Any, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> None:
        """Meet the other ranks of a group; collective over them.

        Args:
            store: where they meet, for this group alone.
            ranks: of the world.
            rank: of the world.
            timeout: of each call.
        """
        gloo: Any = dist.ProcessGroupGloo
        self._group = gloo(store, ranks.index(rank), len(ranks), timeout)

    def forms(self, operation: str) -> tuple[bool, ...]:
        return _torch_forms(operation)

    def call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        group, options = self._group, _gloo_options(case)
        root = case.rank == 0
        if case.operation == "all_reduce":
            return lambda: group.allreduce([result], options).wait()
        if case.operation == "all_gather":
            return lambda: group._allgather_base(result, operand, options).wait()
        if case.operation == "reduce_scatter":
            return lambda: group._reduce_scatter_base(result, operand, options).wait()
        if case.operation == "broadcast":
            return lambda: group.broadcast([result], options).wait()
        if case.operation == "reduce":
            return lambda: group.reduce([result], options).wait()
        if case.operation == "gather":
            parts = [split(result, case.count)] if root else []
            return lambda: group.gather(parts, [operand], options).wait()
        if case.operation == "scatter":
            shares = [split(operand, case.count)] if root else []
            return lambda: group.scatter([result], shares, options).wait()
        if case.operation == "all_to_all":
            return lambda: group.alltoall_base(result, operand, [], [], options).wait()
        return self.barrier if case.operation == "barrier" else self.point_to_point(case, operand, result)

    def barrier(self) -> None:
        self._group.barrier(dist.BarrierOptions()).wait()

    def send(self, tensor: Tensor, peer: int) -> None:
        self._group.send([tensor], peer, 0).wait()

    def receive(self, tensor: Tensor, peer: int) -> None:
        self._group.recv([tensor], peer, 0).wait()

    def exchange(self, operand: Tensor, result: Tensor, peer: int) -> None:
        works = [self._group.send([operand], peer, 0), self._group.recv([result], peer, 0)]
        for work in works:
            work.wait()

    def close(self) -> None:
        del self._group


def _gloo_options(case: Case) -> Any:
    """The options object of a call, made once: its making is not what is measured."""
    kinds = {
        "all_reduce": "AllreduceOptions",
        "all_gather": "AllgatherOptions",
        "reduce_scatter": "ReduceScatterOptions",
        "broadcast": "BroadcastOptions",
        "reduce": "ReduceOptions",
        "gather": "GatherOptions",
        "scatter": "ScatterOptions",
        "all_to_all": "AllToAllOptions",
    }
    if case.operation not in kinds:
        return None
    options = getattr(torch._C._distributed_c10d, kinds[case.operation])()
    if hasattr(options, "reduceOp"):
        options.reduceOp = getattr(dist.ReduceOp, case.redop.upper())
    if hasattr(options, "rootRank"):
        options.rootRank = 0
    return options


class ChannelDriver(Driver):
    """An all-reduce of dthpc's own, as gradients take it."""

    def __init__(
        self,
        name: str,
        start: Callable[[Tensor], Pending],
        group: dist.ProcessGroup,
        owned: Sequence[dist.ProcessGroup],
    ) -> None:
        """Take the all-reduce.

        Args:
            name: for the table.
            start: begins it.
            group: all its ranks.
            owned: groups that end with it.
        """
        self.name, self._start, self._group, self._owned = name, start, group, list(owned)

    def forms(self, operation: str) -> tuple[bool, ...]:
        return (True,) if operation == "all_reduce" else ()

    def call(self, case: Case, operand: Tensor, result: Tensor) -> Call:
        return lambda: self._start(result).wait()

    def barrier(self) -> None:
        dist.barrier(self._group)

    def close(self) -> None:
        for group in self._owned:
            dist.destroy_process_group(group)
