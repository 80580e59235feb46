"""Jobs that hang or lose a rank, each in another way, for the tests of hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.runtime import execute
from dthpc.parallel.pipeline.schedule import build
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker

RANKS = 3
RETURNED = 3
"""Calls that go well before something happens."""


def _work() -> None:
    for _ in range(RETURNED):
        dist.all_reduce(torch.ones(4))


def _together(context: Any) -> None:
    """Go on when all ranks have left word that they are here, without a collective."""
    folder: Path = context.attempt.path
    (folder / f"here-{context.identity.rank}").touch()
    while not all((folder / f"here-{rank}").exists() for rank in range(context.identity.world_size)):
        time.sleep(0.01)


def killed(config: Any, context: Any) -> None:
    """The last rank is killed, while the others wait in a collective or elsewhere."""
    _work()
    context.step = 1
    _together(context)
    if context.identity.rank == context.identity.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.identity.rank == 0:
        time.sleep(300)
    dist.all_reduce(torch.ones(4096))


def stopped(config: Any, context: Any) -> None:
    """The last rank is stopped, not killed."""
    _work()
    if context.identity.rank == context.identity.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4096))


def endless(config: Any, context: Any) -> None:
    """The last rank never comes to the collective."""
    _work()
    while context.identity.rank == context.identity.world_size - 1:
        time.sleep(0.01)
    dist.all_reduce(torch.ones(4096))


def different(config: Any, context: Any) -> None:
    """The last rank calls something else."""
    _work()
    if context.identity.rank == context.identity.world_size - 1:
        dist.all_gather([torch.ones(512) for _ in range(context.identity.world_size)], torch.ones(512))
    else:
        dist.all_reduce(torch.ones(4096))


def raises(config: Any, context: Any) -> None:
    """The last rank raises, while rank 0 is no collective and the others are in one."""
    _work()
    _together(context)
    if context.identity.rank == context.identity.world_size - 1:
        raise ValueError("a hole in the data")
    if context.identity.rank == 0:
        time.sleep(300)
    dist.all_reduce(torch.ones(4096))


def unheard(config: Any, context: Any) -> None:
    """A message is awaited that nobody sends."""
    _work()
    if context.identity.rank == 0:
        dist.recv(torch.ones(7), 1)
    while True:
        time.sleep(0.01)


def stage_missing(config: Any, context: Any) -> None:
    """A stage of a pipeline does not come to its work."""
    rank = context.identity.rank
    schedule = build("1f1b", RANKS, 1, RANKS)
    links = Links(schedule, dist.group.WORLD, torch.device("cpu"))
    worker = ModuleWorker({rank: torch.nn.Linear(6, 6)}, RANKS, lambda outputs, targets: (outputs.sum(), 1))
    batches = [MicroBatch(torch.ones(2, 6), torch.ones(2), 2)] * RANKS
    for step in range(3):
        while rank == 1 and step == 2:
            time.sleep(0.01)
        worker.begin(batches, schedule.actions[rank])
        execute(schedule.actions[rank], worker, links)


def in_cxx(config: Any, context: Any) -> None:
    """The last rank does not come to DDP's gradients, which are summed in C++."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(5, 5))
    model(torch.ones(2, 5)).sum().backward()
    while context.identity.rank == context.identity.world_size - 1:
        time.sleep(0.01)
    model(torch.ones(2, 5)).sum().backward()


def patient(config: Any, context: Any) -> None:
    """Everything that looks like a hang and is none: a long evaluation, a receive that is posted long before."""
    _work()
    if context.identity.rank == 0:
        early = dist.irecv(torch.empty(3), 1)
        time.sleep(8)
        early.wait()
    else:
        time.sleep(8)
        if context.identity.rank == 1:
            dist.send(torch.ones(3), 0)
    dist.barrier()
