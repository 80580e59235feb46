"""What ranks do in the tests of the measurement that decides between back ends."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from dthpc.comm.tune import fastest
from tests.comm.meeting import Peer

SLOW = "gloo_and_a_nap"
NAP_S = 0.05


class Slow(dist.ProcessGroup):
    """Gloo's all-reduce after a pause, on one rank or on all: a library that works and is slower."""

    def __init__(self, options: Any, sleeper: int | None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._inner = ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._sleeps = sleeper in (None, options.group_rank)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """As Gloo does it, later."""
        time.sleep(NAP_S * self._sleeps)
        return self._inner.allreduce(tensors, options)

    def getBackendName(self) -> str:
        return SLOW


def decide(rank: int, folder: str, names: list[str], sleeper: int | None) -> tuple[str, str]:
    """The winner, and what is said of it; `sleeper`: the rank that naps, None: all do."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    if SLOW.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(SLOW, lambda options, _: None, extended_api=True, devices=["cpu"])

    def create(options: Any, _: Any) -> Slow:
        return Slow(options, sleeper)

    dist.Backend._plugins[SLOW.upper()] = dist.Backend._BackendPlugin(create, True)
    store = PrefixStore("meeting", dist.FileStore(f"{folder}/store", size))
    store.set_timeout(timedelta(seconds=60))
    specs = {"gloo": "gloo", "slow": f"cpu:{SLOW}"}
    return fastest({name: specs[name] for name in names}, "cpu", store, Peer(rank, size, "here"))


def is_initialized_after(rank: int, folder: str) -> bool:
    """Whether the measurement leaves a process group behind."""
    decide(rank, folder, ["gloo", "slow"], None)
    return dist.is_initialized()
