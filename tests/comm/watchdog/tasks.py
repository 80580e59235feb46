"""What ranks do in the tests of what is recorded of collectives."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dthpc.comm.collectives import Channel
from dthpc.comm.shared import share_memory
from dthpc.comm.watchdog.account import Account, Witness
from dthpc.comm.watchdog.hooks import Hooks
from dthpc.comm.watchdog.recorder import Recorder
from dthpc.comm.watchdog.torch_record import TorchRecord, set_default_timeout
from tests.attempt.runs import wait_for

Call = dict[str, Any]


def recorded(rank: int, size: int) -> list[Call]:
    """What is recorded of calls of every kind: torch's functions, objects, messages, our own channel, a new group."""
    recorder = Recorder(100)
    hooks = Hooks(recorder)
    try:
        dist.all_reduce(torch.ones(4, 5))
        dist.all_gather_object([None] * size, "word")
        dist.broadcast(torch.ones(3, dtype=torch.int64), 0)
        if rank < 2:
            dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)
        dist.all_gather([torch.ones(6) for _ in range(size)], torch.ones(6))
        group = dist.group.WORLD
        assert group is not None
        whole = torch.zeros(size * 7)
        Channel(group).all_gather(whole, torch.ones(7)).wait()
        pair = dist.new_group(list(range(size)), group_desc="pair")
        dist.barrier(pair)
    finally:
        hooks.remove()
    dist.all_reduce(torch.ones(1))
    return [entry.to_json(time.monotonic()) for entry in recorder.entries]


def untouched(rank: int) -> bool:
    """Whether methods are what they were once the hooks are gone, and results are right with them."""
    before = [dist.ProcessGroup.__dict__["allreduce"], dist.Work.__dict__["wait"]]
    hooks = Hooks(Recorder(10))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    hooks.remove()
    after = [dist.ProcessGroup.__dict__["allreduce"], dist.Work.__dict__["wait"]]
    return before == after and total.item() == 1.0


def states(rank: int) -> list[str]:
    """States of an all-reduce that the other rank joins late, before and after, and of one that is refused."""
    recorder = Recorder(10)
    hooks = Hooks(recorder)
    seen = []
    try:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            seen.append(recorder.entries[-1].state)
            store.set("go", "")
            work.wait()
        else:
            store.wait(["go"])
            dist.all_reduce(torch.ones(3))
        seen.append(recorder.entries[-1].state)
        try:
            dist.group.WORLD.allreduce([], dist.AllreduceOptions())  # type: ignore[union-attr]
        except RuntimeError:
            seen.append(recorder.entries[-1].state)
        return seen
    finally:
        hooks.remove()
        if rank == 0:
            store.delete_key("go")


def in_cxx(rank: int) -> tuple[list[Call], list[Call]]:
    """What Python and what torch have seen of DDP's gradients."""
    recorder = Recorder(100)
    hooks = Hooks(recorder)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(11, 13))
        model(torch.ones(2, 11)).sum().backward()
        own = [entry.to_json(time.monotonic()) for entry in recorder.entries]
        # torch notes the end of a collective a moment after it has woken who waits for it.
        wait_for(lambda: all(call["state"] == "finished" for call in TorchRecord().read()))
        return own, TorchRecord().read()
    finally:
        hooks.remove()


def waiting(rank: int) -> Account | None:
    """What rank 0 says of itself while it waits in a collective for rank 1."""
    import threading

    recorder = Recorder(10)
    hooks = Hooks(recorder)
    store = dist.distributed_c10d._get_default_store()
    found: list[Account] = []
    try:
        if rank == 0:
            witness = Witness(0, "here", recorder, TorchRecord(), lambda: 3)

            def look() -> None:
                while not any(wait.entry and wait.entry.state == "in flight" for wait in recorder.waits()):
                    time.sleep(0.01)
                found.append(witness.account())
                store.set("seen", "")

            looker = threading.Thread(target=look)
            looker.start()
            dist.all_reduce(torch.ones(2, 21))
            looker.join()
        else:
            store.wait(["seen"])
            dist.all_reduce(torch.ones(2, 21))
    finally:
        hooks.remove()
    return found[0] if found else None


def timeouts(rank: int, seconds: float) -> list[float]:
    """Time-outs of groups that nobody gave one, by each way of making them."""
    from torch.distributed.device_mesh import init_device_mesh

    set_default_timeout(seconds)
    size = dist.get_world_size()
    groups = [
        dist.new_group(list(range(size))),
        dist.new_group(list(range(size)), use_local_synchronization=True),
        init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b")).get_group("a"),
    ]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def over_memory(rank: int) -> list[Call]:
    """What is recorded of collectives over shared memory."""
    group = dist.group.WORLD
    assert group is not None
    exchange = share_memory(group, 30.0).exchange
    assert exchange is not None
    recorder = Recorder(10)
    hooks = Hooks(recorder)
    try:
        exchange.all_reduce(torch.ones(17)).wait()
        ticket = exchange.barrier()
        before = recorder.entries[-1].to_json(time.monotonic())
        ticket.wait()
        del ticket
        return [recorder.entries[0].to_json(time.monotonic()), before, recorder.entries[1].to_json(time.monotonic())]
    finally:
        hooks.remove()
        exchange.room.close()
