"""All-reduce in three steps: a reduce-scatter in each node, an all-reduce of the shares across nodes, an all-gather in
each node.

With k ranks on each of N nodes, a flat ring over all p = kN ranks sends 2(p-1)/p of the tensor over each node's link,
this 2(N-1)/N: for two nodes of four ranks 1 instead of 1.75; and the messages that cross nodes are fewer. Inside a node
it costs two more passes over memory. Source: Cho, Finkler, Kung, Hunter, "BlueConnect: Decomposing All-Reduce for Deep
Learning on Heterogeneous Network Hierarchy", MLSys 2019, section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.addresses import host_identity
from dthpc.comm.collectives import BufferPool, Channel, Pending
from dthpc.comm.shared import share_memory
from dthpc.comm.spread import split_by_node, why_one_level


class HierarchicalAllReduce:
    """The all-reduce of a group whose ranks are spread evenly over nodes, with the interface of `Channel.all_reduce`.

    Every element is summed by one rank of each node and then by one cross group alone, in the order of that group, and
    all others copy what came of it: all ranks get the same bits, and each time the same.
    """

    def __init__(self, node: Channel, cross: Channel, pool: BufferPool | None = None) -> None:
        """Take two channels, over any backends.

        Args:
            node: the ranks of the group on this node.
            cross: the ranks of the group, one of each node, that have this rank's position in their `node`.
            pool: room for what does not divide by the ranks of a node; None: one of its own.
        """
        self.node, self.cross = node, cross
        self._pool = pool if pool is not None else BufferPool()

    def all_reduce(self, flat: Tensor) -> Pending:
        """Sum a contiguous `[n]` in place, of any n; asynchronous as `Channel.all_reduce` is."""
        left = flat.numel() % self.node.size
        if not left:
            return self._reduce([flat])
        even, odd = flat[: flat.numel() - left], flat[flat.numel() - left :]
        # What is left over takes the same way, filled up to one element for each rank, so that it, too, is summed once.
        block = self._pool.take(self.node.size, flat.dtype, flat.device).zero_()
        block[:left].copy_(odd)

        def put_back() -> None:
            odd.copy_(block[:left])
            self._pool.give(block)

        return self._reduce([even, block] if even.numel() else [block]).then(put_back)

    def _reduce(self, parts: list[Tensor]) -> Pending:
        """Sum tensors whose elements divide by the ranks of a node."""
        mine = [part.chunk(self.node.size)[self.node.rank] for part in parts]

        def gather() -> Pending:
            return Pending([self.node.all_gather(part, share) for part, share in zip(parts, mine, strict=True)])

        def cross() -> Pending:
            return Pending([self.cross.all_reduce(share) for share in mine], second=gather)

        scatter = [self.node.reduce_scatter(share, part) for part, share in zip(parts, mine, strict=True)]
        return Pending(scatter, second=cross)


@dataclass(frozen=True)
class Levels:
    """What came of the wish to reduce in three steps; the same on all ranks of a group."""

    reduction: HierarchicalAllReduce | None
    """The way in three steps; None: there is none."""

    nodes: int
    """Nodes that the group is on."""

    reason: str
    """Why there is one, or none."""


def make_levels(group: dist.ProcessGroup, *, timeout_s: float, memory: bool, host: str | None = None) -> Levels:
    """Make the groups of the two levels; collective over the group.

    Args:
        group: the ranks, over a backend that can gather objects.
        timeout_s: of the collectives of the new groups.
        memory: whether ranks of a node may talk over memory.
        host: what tells this rank's node from others; None: what the kernel says.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, host or host_identity(), group)
    nodes, split = len(set(hosts)), split_by_node(hosts)
    if split is None:
        return Levels(None, nodes, why_one_level(hosts))
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    made = []
    for level in split:
        members = [ranks[place] for place in next(places for places in level if rank in places)]
        made.append(
            dist.new_group(
                members, timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
            )
        )
    inside, across = made
    exchange = share_memory(inside, timeout_s).exchange if memory else None
    reduction = HierarchicalAllReduce(Channel(inside, exchange=exchange), Channel(across))
    return Levels(reduction, nodes, f"{size // nodes} ranks on each of {nodes} nodes")


def compare(
    flat: Callable[[Tensor], Pending],
    hierarchical: Callable[[Tensor], Pending],
    group: dist.ProcessGroup,
    device: torch.device,
    elements: Sequence[int] = (1 << 18, 1 << 20),
    repeats: int = 2,
) -> list[tuple[int, float, float]]:
    """Time both ways on the ranks of a group, in turns; collective, and the same on all of them.

    Args:
        flat: starts the all-reduce in one step.
        hierarchical: starts the other.
        group: the ranks.
        device: where tensors lie.
        elements: sizes, of fp32.
        repeats: times of each, after one that does not count; the quickest counts, of the slowest rank.

    Returns:
        For each size: bytes, seconds in one step, seconds in three.
    """
    found = []
    for count in elements:
        tensor = torch.zeros(count, device=device)
        best = torch.full((2,), torch.inf, dtype=torch.float64, device=device)
        for number in range(repeats + 1):
            for place, start in enumerate((flat, hierarchical)):
                took = torch.tensor([_seconds(start, tensor)], dtype=torch.float64, device=device)
                dist.all_reduce(took, dist.ReduceOp.MAX, group)
                if number:
                    best[place] = torch.minimum(best[place], took[0])
        found.append((tensor.nbytes, float(best[0]), float(best[1])))
    return found


def _seconds(start: Callable[[Tensor], Pending], tensor: Tensor) -> float:
    began = time.perf_counter()
    start(tensor).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def is_quicker(times: Sequence[tuple[int, float, float]]) -> bool:
    """Whether three steps are quicker: at the largest size, and over all sizes in the geometric mean."""
    product = 1.0
    for _, flat, hierarchical in times:
        product *= hierarchical / flat
    return bool(times) and times[-1][2] < times[-1][1] and product < 1
