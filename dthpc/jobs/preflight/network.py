"""What ranks measure together: all-reduces of all and of pairs of nodes, and the nodes' clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.jobs.collectives.tournament import partner, rounds

_ASKS = 9
_SMALL = 1024


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job and which ranks sit on each."""

    names: list[str]
    """In the order of their first ranks."""

    ranks: list[list[int]]
    """Of each node, in order."""

    mine: int
    """Index of this rank's node."""

    place: int
    """This rank's place among those of its node."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.place == 0


def find_nodes(host: str) -> Nodes:
    """Which ranks sit on which node; collective.

    Args:
        host: of this rank.
    """
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    names = list(dict.fromkeys(str(name) for name in hosts))
    ranks = [[rank for rank, name in enumerate(hosts) if name == node] for node in names]
    mine = names.index(host)
    return Nodes(names, ranks, mine, ranks[mine].index(dist.get_rank()))


def all_reduce(elements: int, repeats: int, device: torch.device) -> tuple[float, float]:
    """Bus bandwidth in bytes/s of an all-reduce over all ranks, and seconds of the smallest one; collective.

    Bus bandwidth is S/t times 2(n-1)/n (nccl-tests), which does not depend on the number of ranks where links are even.

    Args:
        elements: of the fp32 tensor.
        repeats: the fastest counts.
        device: where the tensor lies.
    """
    ranks = dist.get_world_size()
    seconds = [_timed(torch.ones(size, device=device), times) for size, times in ((1, 20), (elements, repeats))]
    share = 2 * (ranks - 1) / ranks
    return 4 * elements * share / seconds[1], seconds[0]


def _timed(tensor: Tensor, times: int) -> float:
    dist.all_reduce(tensor)
    best = float("inf")
    for _ in range(max(1, times)):
        tensor.fill_(1.0)
        _wait(tensor.device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        _wait(tensor.device)
        best = min(best, time.perf_counter() - start)
    return best


def pairs(nodes: Nodes, elements: int, repeats: int, most: int, device: torch.device) -> dict[str, float]:
    """Bytes/s of this rank's share of an all-reduce between its node and each partner, by its name; collective.

    All pairs of a round work at once, and all ranks of two nodes together, rank by rank, so that every NIC is in use.

    Args:
        nodes: of the job.
        elements: of the fp32 tensor of each rank.
        repeats: the fastest counts.
        most: partners of each node.
        device: where the tensors lie.
    """
    found = {}
    count = len(nodes.names)
    # Of an odd number one rests in each round.
    for met in rounds(count, most + count % 2):
        dist.barrier()
        other = partner(met, nodes.mine)
        if other is None:
            continue
        if nodes.place < len(nodes.ranks[other]):
            seconds = _exchange(nodes.ranks[other][nodes.place], elements, repeats, device)
            found[nodes.names[other]] = 4 * elements / seconds
    dist.barrier()
    return found


def _exchange(peer: int, elements: int, repeats: int, device: torch.device) -> float:
    """Seconds of the fastest all-reduce with one other rank: both send all they have and add."""
    best = float("inf")
    for count in (_SMALL, *[elements] * max(1, repeats)):
        own, theirs = torch.ones(count, device=device), torch.empty(count, device=device)
        start = time.perf_counter()
        _swap(peer, own, theirs)
        own += theirs
        _wait(device)
        if count == elements:
            best = min(best, time.perf_counter() - start)
    return best


def _swap(peer: int, own: Tensor, theirs: Tensor) -> None:
    sent = dist.P2POp(dist.isend, own, peer)
    got = dist.P2POp(dist.irecv, theirs, peer)
    for work in dist.batch_isend_irecv([sent, got]):
        work.wait()


def clock(nodes: Nodes, device: torch.device) -> float:
    """Seconds that this node's clock is ahead of the first rank's; 0 on ranks that do not lead; collective.

    The first rank asks, the other answers with its time; of several answers the quickest counts, and half its way is
    taken for the way there (Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        nodes: of the job.
        device: where messages lie.
    """
    ahead = 0.0
    for ranks in nodes.ranks[1:]:
        if dist.get_rank() == nodes.ranks[0][0]:
            _send(_offset_of(ranks[0], device), ranks[0], device)
        elif dist.get_rank() == ranks[0]:
            for _ in range(_ASKS):
                _receive(nodes.ranks[0][0], device)
                _send(time.time(), nodes.ranks[0][0], device)
            ahead = _receive(nodes.ranks[0][0], device)
    return ahead


def _offset_of(rank: int, device: torch.device) -> float:
    answers = []
    for _ in range(_ASKS):
        start = time.time()
        _send(0.0, rank, device)
        theirs = _receive(rank, device)
        end = time.time()
        answers.append((end - start, theirs - (start + end) / 2))
    return min(answers)[1]


def _send(value: float, rank: int, device: torch.device) -> None:
    dist.send(torch.tensor([value], dtype=torch.float64, device=device), rank)


def _receive(rank: int, device: torch.device) -> float:
    got = torch.zeros(1, dtype=torch.float64, device=device)
    dist.recv(got, rank)
    return float(got[0])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
