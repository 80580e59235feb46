"""What ranks do in the tests of the measurement."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dthpc.jobs.collectives.buffers import Arena, Case, count_of, fill, wrong_elements
from dthpc.jobs.collectives.control import Control
from dthpc.jobs.collectives.drivers import MessageDriver, RawGlooDriver, TorchDriver
from dthpc.jobs.collectives.groups import Partition, place_ranks
from dthpc.jobs.collectives.measure import measure
from dthpc.jobs.collectives.pairs import measure_pairs, member_sets
from dthpc.jobs.collectives.settings import FORMS, Settings, Span
from dthpc.jobs.collectives.terms import OPERATIONS
from dthpc.resilience.stop import StopFlag

SETTINGS = Settings(
    spans=(Span(8, 64),),
    operations=OPERATIONS,
    backends=None,
    groups=None,
    dtype="fp32",
    redop="sum",
    forms=FORMS["both"],
    iterations=2,
    seconds=0.01,
    warmup=1,
    check=True,
    memory_share=0.5,
    pairs="auto",
    pair_size=4096,
    hierarchical=True,
    link_gbps=None,
    reference=None,
    slow=0.8,
    plots=True,
)


def driver(name: str, rank: int, size: int) -> MessageDriver:
    """The library, among all ranks of the test."""
    if name == "raw_gloo":
        store = dist.distributed_c10d.PrefixStore("raw", dist.distributed_c10d._get_default_store())
        return RawGlooDriver(store, tuple(range(size)), rank, timedelta(seconds=30))
    group = dist.group.WORLD
    assert group is not None
    return TorchDriver(name, group, False, torch.device("cpu"))


def lines(rank: int, size: int, name: str, dtype: str, redop: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Every operation in every form."""
    control, made = Control(StopFlag()), driver(name, rank, size)
    settings = replace(SETTINGS, dtype=dtype, redop=redop)
    world = Partition("world", (tuple(range(size)),))
    places = place_ranks([("host", "host")] * size)
    arena = Arena(max(*sizes, 8 * size), dtype, torch.device("cpu"))
    found = [
        line.to_json()
        for operation in OPERATIONS
        for bytes_ in sizes
        for line in measure(made, world, places, operation, bytes_, control, arena, settings)
    ]
    made.close()
    return found


def wrong_on_purpose(rank: int, size: int, operation: str, in_place: bool) -> int:
    """Wrong elements of a result of which one element was changed on this rank."""
    made = driver("gloo", rank, size)
    case = Case(operation, count_of(operation, 4000, size, "fp32"), size, rank, in_place=in_place)
    operand, result = Arena(8000, "fp32", torch.device("cpu")).lend(case)
    fill(case, operand, result)
    made.call(case, operand, result)()
    clean = wrong_elements(case, result)
    assert clean == 0
    # Whoever only sends is done early, and must not take its connections away from the others.
    made.barrier()
    result[result.numel() // 2] += 1
    return wrong_elements(case, result)


def matrices(rank: int, hosts: list[str]) -> list[dict[str, Any]]:
    """Pairs of invented nodes, and of the ranks in each."""
    control, made = Control(StopFlag()), driver("gloo", rank, len(hosts))
    places = place_ranks([(host, host) for host in hosts])
    found = []
    for kind, sets in member_sets(places, "auto"):
        found += measure_pairs(made, kind, sets, places, control, SETTINGS)
    return [matrix.to_json() for matrix in found]


def stopped(rank: int, size: int, asked: int) -> str:
    """What comes of one rank's being asked to stop."""
    flag = StopFlag()
    if rank == asked:
        flag.request("SIGTERM")
    try:
        Control(flag).end_if_asked()
    except Exception as error:
        return type(error).__name__
    return "went on"
