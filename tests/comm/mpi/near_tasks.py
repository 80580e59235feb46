"""What MPI ranks do in the tests of the way through memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dthpc.comm.mpi.errors import CommunicationError
from dthpc.comm.mpi.near import LEAST
from dthpc.comm.mpi.windows import Windows, WindowSignals
from dthpc.comm.shared.exchange import Exchange, window_bytes
from dthpc.comm.shared.room import RankLost
from tests.comm.collective_tasks import summands
from tests.comm.mpi.tasks import told, world


@contextlib.contextmanager
def never() -> Iterator[None]:
    """Everything goes through MPI's own calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dthpc.comm.mpi.near.LEAST", 1 << 62)
        yield


def both_ways(rank: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sum, average and this rank's share of a sum, through memory and then without."""
    found = []
    for way in (contextlib.nullcontext(), never()):
        with way:
            size = dist.get_world_size()
            flat = summands(rank, size * count, 0, dtype)
            total, average, share = flat.clone(), flat.clone(), torch.empty(count, dtype=dtype)
            dist.all_reduce(total)
            dist.all_reduce(average, op=dist.ReduceOp.AVG)
            dist.reduce_scatter_single(share, flat)
            found += [total, average, share]
    return found


def taken(rank: int) -> list[bool]:
    """Whether the way through memory takes tensors of some sizes and kinds of reduction."""
    group: Any = world()
    long, short = torch.empty(LEAST // 4), torch.empty(LEAST // 4 - 1)

    def reduces(tensor: torch.Tensor, op: Any) -> bool:
        return bool(group._near.reduces(tensor, group._reducers.rule(tensor, op)))

    return [
        reduces(long, dist.ReduceOp.SUM),
        reduces(short, dist.ReduceOp.SUM),
        reduces(long, dist.ReduceOp.MAX),
        reduces(long.double(), dist.ReduceOp.AVG),
        reduces(short.bfloat16().repeat(4), dist.ReduceOp.SUM),
    ]


def asynchronously(rank: int, calls: int) -> list[torch.Tensor]:
    """Several at once in two groups, which are waited for last first, beside one that nobody waits for."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [summands(rank, 300_000, call) for call in range(calls)]
    works: list[Any] = [
        dist.all_reduce(tensor, group=groups[call % 2], async_op=True) for call, tensor in enumerate(tensors)
    ]
    for work in reversed(works[1:]):
        work.wait()
    works[0].get_future().wait()
    return tensors


def windows_again(rank: int, times: int) -> tuple[int, int]:
    """Groups of the same ranks are made and destroyed; how many windows were made for the two that live at once."""
    group: Any = world()
    windows = group._runtime.windows
    key = tuple(range(dist.get_world_size()))
    before = len(windows._made[key])
    for time in range(times):
        pair = [dist.new_group() for _ in range(2)]
        for one in pair:
            tensor = torch.full((300_000,), float(time))
            dist.all_reduce(tensor, group=one)
            assert tensor.eq(time * len(key)).all()
        # Ranks do not agree on the order.
        for one in pair if rank == 0 else reversed(pair):
            dist.destroy_process_group(one)
    return before, len(windows._made[key])


def mismatch(rank: int) -> list[str]:
    """Ranks bring tensors of different sizes, and then use the group again."""
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=5))
    tensor = torch.ones(400_000 if rank == 0 else 800_000)
    with told(CommunicationError, said):
        dist.all_reduce(tensor, group=group)
    with told(CommunicationError, said):
        dist.barrier(group=group)
    dist.barrier()
    return said


def late(rank: int) -> list[str]:
    """Rank 1 does not come."""
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=1.2))
    if rank == 0:
        with told(CommunicationError, said):
            dist.all_reduce(torch.ones(400_000), group=group)
    dist.barrier()
    return said


def little_memory(rank: int) -> bool:
    """Whether a new group has a way through memory where there is too little for windows."""
    with pytest.MonkeyPatch.context() as patch:
        # A file system that never has anything free; and no window is left from before.
        patch.setattr("dthpc.comm.mpi.windows._SHM", "/proc")
        runtime = cast(Any, world())._runtime
        patch.setattr(runtime, "windows", Windows(runtime.mpi))
        made: Any = dist.new_group()
    tensor = torch.ones(400_000)
    dist.all_reduce(tensor, group=made)
    assert tensor.eq(dist.get_world_size()).all()
    return bool(made._near.reduces(tensor, made._reducers.rule(tensor, dist.ReduceOp.SUM)))


def waiting(rank: int) -> list[str]:
    """Ranks wait for each other in the window itself, and then rank 0 alone."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl([0, 1]))
    room = WindowSignals(MPI, comm, timeout_s=0.3 if rank == 0 else 60.0)
    exchange = Exchange(room, room.allocate(window_bytes(2)))
    tensor = summands(rank, 500_000, 0)
    exchange.all_reduce(tensor).wait()
    exchange.barrier().wait()
    torch.testing.assert_close(tensor, summands(0, 500_000, 0) + summands(1, 500_000, 0))
    said: list[str] = []
    if rank == 0:
        with told(RankLost, said):
            exchange.barrier().wait()
    dist.barrier()
    return said
