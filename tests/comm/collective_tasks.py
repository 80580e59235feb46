"""What ranks do in the tests of collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dthpc.comm.collectives import Channel


def summands(rank: int, count: int, call: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * call + rank)).to(dtype)


def scatter(
    rank: int, size: int, count: int, dtype: torch.dtype, wide: torch.dtype, add: bool, in_place: bool, calls: int
) -> list[torch.Tensor]:
    """Shares of this rank from several reduce-scatters that are under way at once."""
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group)
    flats = [summands(rank, size * count, call, dtype) for call in range(calls)]
    outs = [flat.chunk(size)[rank] if in_place else torch.ones(count, dtype=wide) for flat in flats]
    pending = [channel.reduce_scatter(out, flat, add=add) for out, flat in zip(outs, flats, strict=True)]
    for one in pending:
        one.wait()
    return [out.clone() for out in outs]


def gather(rank: int, size: int, count: int, in_place: bool, calls: int) -> list[torch.Tensor]:
    """What several all-gathers that are under way at once return."""
    group = dist.group.WORLD
    assert group is not None
    outs = [torch.full((size * count,), torch.nan) for _ in range(calls)]
    mine = [summands(rank, count, call) for call in range(calls)]
    if in_place:
        for call, out in enumerate(outs):
            out.chunk(size)[rank].copy_(mine[call])
            mine[call] = out.chunk(size)[rank]
    for one in [Channel(group).all_gather(out, own) for out, own in zip(outs, mine, strict=True)]:
        one.wait()
    return outs


def mixture(rank: int, size: int, rounds: int) -> list[torch.Tensor]:
    """Collectives of all kinds and sizes in one group, some of which are waited for late."""
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group)
    results, pending = [], []
    for call in range(rounds):
        count = 3 + 1000 * (call % 3)
        flat = summands(rank, size * count, call)
        share, whole, total = torch.empty(count), torch.empty(size * count), flat.clone()
        pending += [channel.reduce_scatter(share, flat), channel.all_reduce(total)]
        pending.append(channel.all_gather(whole, summands(rank, count, call)))
        theirs = torch.full((count,), float(rank))
        if size % 2 == 0:
            pending.append(channel.swap(theirs, torch.full((count,), float(rank)), rank ^ 1))
        results.append([share, total, whole, theirs])
        while len(pending) > 5:
            pending.pop(0).wait()
    for one in pending:
        one.wait()
    return [tensor for tensors in results for tensor in tensors]
