"""What MPI ranks do in the tests of the process group."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dthpc.comm.mpi.errors import CommunicationError, CommunicationTimeout, MismatchError


def world() -> Any:
    return dist.group.WORLD


@contextlib.contextmanager
def told(kind: type[Exception], into: list[str]) -> Iterator[None]:
    """Demand an error, and keep its text."""
    try:
        yield
    except kind as error:
        into.append(str(error))
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


# --- errors ---------------------------------------------------------------------------------------------------------


def late_rank(rank: int, late: int) -> list[str]:
    """One rank comes after the others' time is over; what they are told, and what they are told afterwards."""
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=1.2))
    if rank != late:
        tensor = torch.ones(5)
        with told(CommunicationTimeout, said):
            dist.all_reduce(tensor, group=group)
        with told(CommunicationError, said):
            dist.barrier(group=group)
    dist.barrier()
    return said


def late_asynchronously(rank: int, late: int) -> list[str]:
    """The same where nobody waits, so that the progress thread sees it, and the future tells it."""
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=0.6))
    if rank != late:
        # The second is of several steps, and is not started before the first: it fails with it.
        first = dist.all_reduce(torch.ones(50_000, dtype=torch.bfloat16), group=group, async_op=True)
        second = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        for work in (first, second):
            assert work is not None
            with told(Exception, said):
                work.get_future().wait()
    dist.barrier()
    return said


def queued_behind_an_error(rank: int) -> list[str]:
    """An operation that others wait for fails at once: ranks bring tensors of different sizes."""
    said: list[str] = []
    group: Any = dist.new_group()
    # Of several steps, as bf16 is summed here; the mismatch is in memory, which tells it.
    short, long = torch.ones(300_000, dtype=torch.bfloat16), torch.ones(400_000 if rank == 0 else 800_000)
    works = [group.allreduce_coalesced([short, long]), dist.all_reduce(torch.ones(3), group=group, async_op=True)]
    for work in works:
        with told(CommunicationError, said):
            work.wait()
    dist.barrier()
    return said


def silent_peer(rank: int) -> list[str]:
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=0.6))
    if rank == 0:
        with told(CommunicationTimeout, said):
            dist.recv(torch.empty(3), src=1, group=group, tag=9)
    dist.barrier()
    return said


def other_order(rank: int) -> list[str]:
    """Ranks that call different operations: a time-out says who called what."""
    said: list[str] = []
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    with told(CommunicationTimeout, said):
        if rank == 0:
            dist.recv(torch.empty(1), src=1, group=group)
        elif rank == 1:
            time.sleep(0.2)
            work: Any = dist.reduce_scatter_single(torch.empty(2), torch.empty(6), group=group, async_op=True)
            work.wait()
        else:
            dist.all_gather_single(torch.empty(6), torch.empty(2), group=group)
    dist.barrier()
    return said


def monitored(rank: int, late: list[int], everyone: bool) -> list[str]:
    said: list[str] = []
    group: Any = dist.new_group()
    group.monitored_barrier(timedelta(seconds=20))
    if rank not in late:
        with told(CommunicationTimeout, said):
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=everyone)
    dist.barrier()
    return said


def absent_member(rank: int) -> list[str]:
    """A group of ranks 0 and 2 that rank 2 does not come to make."""
    said: list[str] = []
    if rank == 0:
        with told(CommunicationTimeout, said):
            world().split_group([0, 2], timeout=timedelta(seconds=0.5))
    dist.barrier()
    return said


def too_much(rank: int) -> list[str]:
    """Messages of other sizes than the receiver expects."""
    said: list[str] = []
    group: Any = dist.new_group()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
        dist.send(torch.ones(8), 1, group=group)
    else:
        with told(ValueError, said):
            dist.recv(torch.empty(5), 0, group=group)
        with told(CommunicationError, said):
            dist.recv(torch.empty(5), 0, group=group)
    return said


def mismatches(rank: int) -> list[str]:
    """The checked mode: every kind of difference is told on all ranks, and the group goes on."""
    said: list[str] = []
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        group: Any = dist.new_group()
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level_from_env()
    odd = rank == 1
    with told(MismatchError, said):
        dist.all_reduce(torch.ones(4 if odd else 3), group=group)
    with told(MismatchError, said):
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), group=group)
    with told(MismatchError, said):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)
    with told(MismatchError, said):
        dist.barrier(group=group) if odd else dist.broadcast(torch.ones(3), 0, group=group)
    with told(MismatchError, said):
        dist.broadcast(torch.ones(3), int(odd), group=group)
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    for work in works:
        assert work is not None
        work.wait()
    assert tensor.eq(dist.get_world_size()).all()
    return said


def wrong_arguments(rank: int) -> list[str]:
    """What is refused before anything is sent."""
    said: list[str] = []
    size = dist.get_world_size()
    with told(ValueError, said):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with told(ValueError, said):
        world().allreduce([torch.ones(3, dtype=torch.complex64)], _options(dist.ReduceOp.MAX))
    with told(ValueError, said):
        dist.all_gather_single(torch.empty(size * 3), torch.empty(4))
    with told(ValueError, said):
        dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1))
    with told(ValueError, said):
        dist.isend(torch.ones(1), (rank + 1) % size, tag=2**40)
    dist.barrier()
    return said


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def die(rank: int, victim: int) -> None:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


# --- numbers --------------------------------------------------------------------------------------------------------


def short_floats(rank: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """All reductions of random short floats."""
    mine = summand(rank, count, dtype)
    size = dist.get_world_size()
    total, average, share = mine.clone(), mine.clone(), torch.empty(count // size, dtype=dtype)
    dist.all_reduce(total)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    dist.reduce_scatter_single(share, mine[: count // size * size])
    rooted = mine.clone()
    dist.reduce(rooted, 0)
    return [total, average, share, rooted]


def summand(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def not_a_number(rank: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Minimum and maximum where only the last rank has NaN."""
    results = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        tensor = torch.full((count,), float(rank)).to(dtype)
        if rank == dist.get_world_size() - 1:
            tensor[1] = torch.nan
        dist.all_reduce(tensor, op)
        results.append(tensor.float())
    return results


def premultiplied(rank: int) -> torch.Tensor:
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    return tensor


def same_bits(rank: int, dtype: torch.dtype, op: str) -> list[bytes]:
    """Random sums of several sizes, as bytes."""
    results = []
    for count in (1, 7, 1000, 70_001):
        tensor = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        results.append(tensor.view(torch.uint8).numpy().tobytes())
    return results


def parameters(rank: int) -> list[tuple[float, bool, bool]]:
    """Tensors that require gradients, of both ways and both layouts; what comes of the first element, leaf, graph."""
    found = []
    for rows in (3, 700):
        for dtype in (torch.float32, torch.bfloat16):
            for transposed in (False, True):
                tensor = torch.ones(rows, rows, dtype=dtype)
                own = torch.nn.Parameter(tensor.t() if transposed else tensor)
                dist.all_reduce(own, op=dist.ReduceOp.AVG)
                work: Any = dist.all_reduce(own, async_op=True)
                work.wait()
                dist.broadcast(own, 0)
                everything = torch.empty(dist.get_world_size() * rows, rows, dtype=dtype)
                dist.all_gather_single(everything, own)
                share = torch.empty(rows * rows // 3 // dist.get_world_size(), dtype=dtype)
                flat = own.flatten()
                dist.reduce_scatter_single(share, flat[: share.numel() * dist.get_world_size()])
                found += [(float(own[0, 0]), own.is_leaf, everything.requires_grad or share.requires_grad)]
    return found


def huge(rank: int, elements: int) -> list[bool]:
    """Messages of more than 2^31 bytes, which are also more elements than an int counts."""
    mine = torch.full((elements,), rank + 1, dtype=torch.uint8)
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(mine, 0)
    dist.all_reduce(mine)
    return [bool(mine[at] == 2) for at in (0, elements // 2, -1)]


def in_pieces(rank: int) -> None:
    """All operations of a group whose library would count to 10 only, as others do to 2^31."""
    group: Any = dist.new_group()
    group._collectives.buffers.most = 10
    size, shape = dist.get_world_size(), (5, 7)
    for case in (tensors_of(rank, torch.int32, shape), tensors_of(rank, torch.bfloat16, shape)):
        mine, everyone = case[rank], torch.stack(case)
        total = everyone.sum(0, dtype=mine.dtype)
        for reduce, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, everyone.amax(0))):
            reduced = mine.clone()
            dist.all_reduce(reduced, reduce, group=group)
            assert torch.equal(reduced, expected)
        dist.reduce(rooted := mine.clone(), 1, group=group)
        assert rank != 1 or torch.equal(rooted, total)
        dist.all_gather_single(gathered := torch.empty_like(everyone), mine, group=group)
        assert torch.equal(gathered, everyone)
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        assert torch.equal(torch.stack(parts), everyone)
        dist.reduce_scatter_single(share := torch.empty_like(mine), everyone, group=group)
        assert torch.equal(share, mine * size)
        dist.reduce_scatter_single(share, everyone, dist.ReduceOp.MAX, group=group)
        assert torch.equal(share, mine)
        dist.all_to_all_single(swapped := torch.empty_like(everyone), everyone, group=group)
        assert torch.equal(swapped, torch.stack([mine] * size))
        dist.broadcast(told_to := mine.clone(), 1, group=group)
        assert torch.equal(told_to, case[1])
        dist.scatter(share, case if rank == 0 else None, 0, group=group)
        assert torch.equal(share, mine)
        dist.gather(mine, parts if rank == 0 else None, 0, group=group)
        assert rank != 0 or torch.equal(torch.stack(parts), everyone)
        sent = dist.isend(mine, (rank + 1) % size, group=group)
        dist.recv(share, (rank - 1) % size, group=group)
        assert sent is not None
        sent.wait()
        assert torch.equal(share, case[(rank - 1) % size])


def tensors_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Every rank's tensor of small whole numbers."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(-4, 5, shape, generator=draw).to(dtype) for _ in range(dist.get_world_size())]


# --- life -----------------------------------------------------------------------------------------------------------


def groups_again(rank: int, times: int) -> list[float]:
    """Groups made and destroyed more often than MPI has communicators at once."""
    totals = []
    for _ in range(times):
        group: Any = dist.new_group([0, 1])
        if rank < 2:
            tensor = torch.full((2,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            totals.append(float(tensor[0]))
            dist.destroy_process_group(group)
    return totals


def split(rank: int) -> list[Any]:
    """Halves of the world, of which the second is in descending order; their names, ranks and sums."""
    size = dist.get_world_size()
    half = list(range(size // 2)) if rank < size // 2 else list(range(size - 1, size // 2 - 1, -1))
    part = world().split_group(half, group_desc="half")
    tensor = torch.tensor([float(rank)])
    part.allreduce([tensor]).wait()
    described = [part.rank(), part.size(), part.name(), part.group_desc, float(tensor)]
    part.shutdown()
    return described


def pending_at_the_end(rank: int) -> float:
    """A group that is destroyed with an operation under way completes it."""
    group: Any = dist.new_group()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)
    return float(tensor.min())


def futures(rank: int) -> list[Any]:
    """A chain of callbacks of which one starts the next collective and waits for it."""
    tensor = torch.ones(60_000, dtype=torch.bfloat16)
    second = torch.ones(4)
    threads: list[str] = []

    def follow(future: Any) -> float:
        threads.append(threading.current_thread().name)
        dist.all_reduce(second)
        return float(future.value()[0][0]) + float(second[0])

    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    answer = work.get_future().then(follow).wait()
    return [answer, work.is_completed(), work.is_success()]


# --- threads --------------------------------------------------------------------------------------------------------


def soak(rank: int, rounds: int) -> list[str]:
    """Several threads, each with groups and messages of its own, at once."""
    size = dist.get_world_size()
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    pairs: list[Any] = [dist.new_group([a, b]) for a in range(size) for b in range(a + 1, size)]
    mine = [pair for pair in pairs if dist.get_rank(pair) >= 0]
    wrong: list[str] = []

    def collect(number: int) -> None:
        group, draw = groups[number], torch.Generator().manual_seed(number)
        for _ in range(rounds):
            count = int(torch.randint(1, 30_000, (1,), generator=draw))
            dtype = [torch.float32, torch.bfloat16, torch.int64][int(torch.randint(3, (1,), generator=draw))]
            tensor, gathered = torch.ones(count, dtype=dtype), torch.empty(size * count, dtype=dtype)
            works: list[Any] = [dist.all_reduce(tensor, group=group, async_op=True)]
            works.append(
                dist.all_gather_single(gathered, torch.full((count,), rank, dtype=dtype), group=group, async_op=True)
            )
            for work in works[:: 1 if number else -1]:
                work.wait()
            if (
                not tensor.eq(size).all()
                or not gathered.view(size, count).eq(torch.arange(size).to(dtype)[:, None]).all()
            ):
                wrong.append(f"thread {number}: {dtype} {count}")

    def trade() -> None:
        for turn in range(rounds):
            for pair in mine:
                peer = 1 - dist.get_rank(pair)
                theirs = torch.empty(500 * (turn % 5) + 1)
                send = dist.isend(torch.full_like(theirs, rank), group=pair, group_dst=peer, tag=turn)
                dist.recv(theirs, group=pair, group_src=peer, tag=turn)
                assert send is not None
                send.wait()
                if not theirs.eq(dist.get_global_rank(pair, peer)).all():
                    wrong.append(f"message {turn}")

    threads = [threading.Thread(target=collect, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=trade))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def crossed_groups(rank: int) -> float:
    """Two groups of the same ranks whose collectives start in opposite orders."""
    first, second = (dist.new_group() for _ in range(2))
    tensors = [torch.ones(200_000), torch.ones(200_000, dtype=torch.bfloat16)]
    order = [(tensors[0], first), (tensors[1], second)][:: 1 if rank % 2 else -1]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in order]
    for work in works:
        assert work is not None
        work.wait()
    return float(tensors[0].min() + tensors[1].float().min())
