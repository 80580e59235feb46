"""What ranks do in the tests of the hierarchical all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dthpc.comm.collectives import Channel
from dthpc.comm.hierarchical import HierarchicalAllReduce, compare
from dthpc.comm.spread import split_by_node


def channels(rank: int, hosts: list[str]) -> HierarchicalAllReduce:
    """The two levels of all ranks, on invented hosts."""
    split = split_by_node(hosts)
    assert split is not None
    found = []
    for level in split:
        members = next(ranks for ranks in level if rank in ranks)
        group = dist.new_group(members, use_local_synchronization=True)
        found.append(Channel(group))
    return HierarchicalAllReduce(*found)


def summands(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce(rank: int, hosts: list[str], counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Sums of several sizes, all of which are under way at once."""
    hierarchical = channels(rank, hosts)
    flats = [summands(rank, count, dtype) for count in counts]
    pending = [hierarchical.all_reduce(flat) for flat in flats]
    pending[0].advance()
    for one in pending:
        one.wait()
    return flats


def choose(rank: int, hosts: list[str]) -> list[tuple[int, float, float]]:
    """Times of both ways."""
    group = dist.group.WORLD
    assert group is not None
    hierarchical, flat = channels(rank, hosts), Channel(group)
    return compare(flat.all_reduce, hierarchical.all_reduce, group, torch.device("cpu"), (100, 1000), 2)
