"""What ranks do in the tests of the rank pool."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def ranks_of(rank: int) -> list[int]:
    """All ranks, by a collective."""
    found = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(rank))
    return [int(each) for each in found]


def process_of(rank: int) -> int:
    """This process."""
    return os.getpid()


def fail(rank: int, failing: int, hanging: int) -> list[int]:
    """One rank fails, and one has better things to do than to notice."""
    if rank == failing:
        raise ValueError("so much for that")
    if rank == hanging:
        time.sleep(600)
    return ranks_of(rank)


def die(rank: int, dying: int) -> list[int]:
    """One rank's process ends."""
    if rank == dying:
        os._exit(7)
    return ranks_of(rank)
