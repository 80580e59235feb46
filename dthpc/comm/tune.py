"""A short measurement that decides between back ends which all work (`comm.tune=true`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dthpc.comm.rendezvous import Identity
from dthpc.monitor.units import size as in_bytes

SIZES = (4 << 10, 256 << 10, 4 << 20)
"""Bytes of the messages: latency, the range of small buckets, and bandwidth."""

_BUDGET_S = 0.15
"""Seconds for each size of each back end; with three back ends well under two in all."""

_FEWEST, _MOST = 3, 50
_TIMEOUT_S = 60.0


def fastest(specs: Mapping[str, str], device: str, store: Any, identity: Identity) -> tuple[str, str]:
    """Measure all-reduces with each back end; collective, before the default group is made.

    The time of a size is that of the slowest rank, which all ranks learn, so that they decide the same. The winner
    has the smallest sum of its times, each relative to the best at that size.

    Args:
        specs: names for `init_process_group`, by library.
        device: `cpu` or `cuda`.
        store: where the ranks meet.
        identity: which rank this is.

    Returns:
        The library, and its figures next to the others'.
    """
    times = {library: _measure(library, spec, device, store, identity) for library, spec in specs.items()}
    best = [min(each[place] for each in times.values()) for place in range(len(SIZES))]
    score = {library: sum(t / b for t, b in zip(each, best, strict=True)) for library, each in times.items()}
    winner = min(score, key=lambda library: score[library])
    told = "; ".join(f"{library} {_told(each)}" for library, each in times.items())
    return winner, f"all-reduce of {', '.join(map(in_bytes, SIZES))}: {told}"


def _measure(library: str, spec: str, device: str, store: Any, identity: Identity) -> list[float]:
    """Seconds of an all-reduce of each size; those of the slowest rank."""
    dist.init_process_group(
        spec,
        store=PrefixStore(f"dthpc/tune/{library}", store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        return [_seconds(size, device) for size in SIZES]
    finally:
        dist.destroy_process_group()


def _seconds(size: int, device: str) -> float:
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    dist.all_reduce(tensor)  # connections are made by the first
    # As many as fit the budget by the slowest rank's first time, so that all ranks do the same number.
    first = _slowest(_time(tensor, 1), device)
    repeats = max(_FEWEST, min(_MOST, int(_BUDGET_S / max(first, 1e-6))))
    return _slowest(min(_time(tensor, 1) for _ in range(repeats)), device)


def _time(tensor: torch.Tensor, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def _slowest(seconds: float, device: str) -> float:
    held = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held.item())


def _told(times: list[float]) -> str:
    return ", ".join(f"{seconds * 1e6:.0f} µs" for seconds in times)
