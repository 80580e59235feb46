"""What ranks do in the tests of shared memory."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dthpc.comm.collectives import Channel
from dthpc.comm.shared import Exchange, handshake, share_memory
from tests.comm.collective_tasks import summands


def exchange_of(timeout_s: float = 60.0) -> Exchange:
    assert dist.group.WORLD is not None
    met = share_memory(dist.group.WORLD, timeout_s)
    assert met.exchange is not None, met.reason
    return met.exchange


def sums(rank: int, size: int, count: int, dtype: torch.dtype, in_place: bool) -> list[torch.Tensor]:
    """An all-reduce and this rank's share of a reduce-scatter of the same summands, in the memory itself or not."""
    exchange = exchange_of()
    flats = [summands(rank, size * count, 0, dtype) for _ in range(2)]
    if in_place:
        nbytes = flats[0].nbytes
        memory = exchange.allocate(2 * nbytes).of(rank)
        lying = [memory[low : low + nbytes].view(dtype) for low in (0, nbytes)]
        for flat, there in zip(flats, lying, strict=True):
            there.copy_(flat)
        flats = lying
    whole, scattered = flats
    out = torch.empty(count, dtype=dtype)
    pending = [exchange.reduce_scatter(out, list(scattered.chunk(size)), False), exchange.all_reduce(whole)]
    for one in pending:
        one.wait()
    return [whole.clone(), out]


def both_ways(rank: int, size: int, count: int, dtype: torch.dtype) -> list[bool]:
    """Whether sums over memory have the bits that Gloo's have."""
    group = dist.group.WORLD
    assert group is not None
    outs = []
    for channel in (Channel(group), Channel(group, exchange=exchange_of())):
        out, gathered = torch.empty(count, dtype=dtype), torch.empty(size * count, dtype=dtype)
        channel.reduce_scatter(out, summands(rank, size * count, 0, dtype)).wait()
        channel.all_gather(gathered, out).wait()
        outs.append((out, gathered))
    return [torch.equal(one, other) for one, other in zip(*outs, strict=True)]


def waits_in_any_order(rank: int, size: int, calls: int) -> list[torch.Tensor]:
    """More exchanges under way than a window has slots, for which each rank waits in an order of its own."""
    exchange = exchange_of()
    flats = [summands(rank, 1000, call) for call in range(calls)]
    outs = [torch.zeros(size * 100) for _ in range(calls)]
    pending = []
    for flat, out in zip(flats, outs, strict=True):
        out.chunk(size)[rank].copy_(flat[:100])
        pending += [exchange.all_reduce(flat), exchange.all_gather(list(out.chunk(size)))]
    order = torch.randperm(len(pending), generator=torch.Generator().manual_seed(rank)).tolist()
    for place in order:
        pending[place].wait()
    return [torch.cat([flat, out]) for flat, out in zip(flats, outs, strict=True)]


def asks(rank: int) -> tuple[bool, bool]:
    """Whether an exchange is ready before and after the other rank has begun it; nobody waits for it."""
    exchange = exchange_of()
    flat = torch.full((5,), 1.0)
    before = False
    if rank == 0:
        mine = exchange.all_reduce(flat)
        before = mine.ready()
        dist.barrier()
    else:
        dist.barrier()
        mine = exchange.all_reduce(flat)
    dist.barrier()
    after = mine.ready()
    assert not after or flat.eq(2).all()
    return before, after


def dies(rank: int, victim: int) -> None:
    """One rank is killed while the others wait for it."""
    exchange = exchange_of()
    exchange.barrier().wait()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.barrier().wait()


def leaves(rank: int) -> str:
    """The second rank ends its part in good order after one exchange, and the first waits for another one."""
    exchange = exchange_of()
    ticket = exchange.barrier()
    if rank == 1:
        ticket.wait()
        exchange.room.close()
        return ""
    ticket.wait()
    try:
        exchange.barrier().wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def keeps_waiting(rank: int) -> str:
    """The last rank does not come in time."""
    exchange = exchange_of(timeout_s=0.3)
    told = ""
    if rank != dist.get_world_size() - 1:
        try:
            exchange.barrier().wait()
        except RuntimeError as error:
            told = str(error)
    dist.barrier()
    return told


def children(rank: int) -> None:
    """The second rank is gone, but not a child that it has forked before; the first ends the child when it notices."""
    exchange = exchange_of()
    child = os.fork() if rank == 1 else 0
    if rank == 1 and child == 0:
        time.sleep(20)
        os._exit(0)
    pids = [0, 0]
    dist.all_gather_object(pids, child)
    time.sleep(0.3 * rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exchange.barrier().wait()
    finally:
        # Raises where it has ended by itself.
        os.kill(pids[1], signal.SIGKILL)


def refusal(rank: int, what: str, culprit: int) -> str | None:
    """Why there is no shared memory, where something is amiss on one rank."""
    assert dist.group.WORLD is not None
    broken: dict[str, dict[str, Any]] = {
        "host": {"_host": lambda: ("elsewhere", "", 0)},
        "memory": {"free_memory": lambda: 1 << 20},
        "no socket": {"_listen": _fail},
        "no connection": {"_connect": _fail},
    }
    with patch.multiple(handshake, PATIENCE_S=1.0, **(broken[what] if rank == culprit else {})):
        met = share_memory(dist.group.WORLD, 5.0)
    assert met.exchange is None
    return met.reason


def no_room(rank: int, culprit: int) -> str | None:
    """Why there is none, where one rank gets no memory."""
    assert dist.group.WORLD is not None
    with patch("dthpc.comm.shared.room.reserve", _fail if rank == culprit else (lambda *_: None)):
        met = share_memory(dist.group.WORLD, 5.0)
    assert met.exchange is None
    return met.reason


def _fail(*_: Any) -> Any:
    raise OSError("it is not to be")


def leftovers(rank: int) -> tuple[int, int, int]:
    """Descriptors before, with and after a room, and mappings left after it."""
    # The group makes connections of its own when it first gathers.
    dist.all_gather_object([None] * dist.get_world_size(), None)

    def count() -> int:
        # Gloo's TCP connections of earlier tasks may still be closing.
        inodes = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
        targets = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("memfd:dthpc" in target or target[8:-1] in inodes for target in targets)

    before = count()
    exchange: Exchange | None = exchange_of()
    assert exchange is not None
    exchange.allocate(10)
    during = count()
    exchange.barrier().wait()
    del exchange
    gc.collect()
    return during - before, count() - before, Path("/proc/self/maps").read_text().count("memfd:dthpc")
