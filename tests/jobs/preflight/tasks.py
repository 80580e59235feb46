"""What ranks do in the tests of preflights: each rank plays a node, or two ranks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dthpc.config.preflight import PreflightChecks
from dthpc.context import RankContext
from dthpc.jobs.preflight.examine import examine
from dthpc.jobs.preflight.network import all_reduce, clock, find_nodes, pairs
from dthpc.placement.identity import RankIdentity
from dthpc.rundir import RunDir

CPU = torch.device("cpu")


def context_of(rank: int, folder: str, each: int) -> RankContext:
    size = dist.get_world_size()
    nodes = size // each
    who = RankIdentity(rank, size, rank % each, each, rank // each, nodes, f"n{rank // each}", 0)
    return RankContext(who, RunDir(Path(folder)), CPU)


def examined(rank: int, folder: str, each: int, checks: dict[str, Any]) -> dict[str, Any]:
    """The report that this rank has."""
    torch.set_num_threads(1)
    return examine(PreflightChecks(**checks), context_of(rank, folder, each)).to_json()


def measured(rank: int, each: int, most: int) -> dict[str, Any]:
    """What the parts find: who is where, rates, and clocks."""
    nodes = find_nodes(f"n{rank // each}")
    rate, latency = all_reduce(1 << 14, 2, CPU)
    met = pairs(nodes, 1 << 14, 2, most, CPU)
    return {"nodes": nodes, "rate": rate, "latency": latency, "met": met, "clock": clock(nodes, CPU)}
