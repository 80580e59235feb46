"""What nccl-tests' words mean, as formulas; free of torch.

Sources: algorithm and bus bandwidth, and what the size of an operation counts: nccl-tests, doc/PERFORMANCE.md.
Costs of algorithms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005, section 3; broadcast as scatter and all-gather: van de Geijn's, section 4.2 there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
POINT_TO_POINT = ("send_recv", "sendrecv", "ping_pong")
OPERATIONS = COLLECTIVES + POINT_TO_POINT

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
"""Operations that have a reduction."""

SHARED = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
"""Operations whose size is that of all ranks' shares together."""


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: bytes that the busiest rank must send (or receive) per byte of size.

    Args:
        operation: one of `OPERATIONS`.
        ranks: of the group.
    """
    if ranks < 2:
        return 1.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in SHARED else 1.0


def algorithm_bandwidth(size: float, seconds: float) -> float:
    """GB/s (10⁹ bytes): size over time."""
    return size / seconds / 1e9


def bus_bandwidth(operation: str, ranks: int, size: float, seconds: float) -> float:
    """GB/s (10⁹ bytes): what to compare with the hardware's rate, whatever the number of ranks."""
    return algorithm_bandwidth(size, seconds) * bus_factor(operation, ranks)


def node_traffic(operation: str, ranks: int, nodes: int) -> float:
    """Bytes that must cross a node's link, in its busier direction, per byte of size, by the best algorithm there is.

    Ranks are spread evenly over the nodes, node after node. With one rank a node it is `bus_factor`.

    Args:
        operation: one of `OPERATIONS`.
        ranks: of the group.
        nodes: that its ranks are on.

    Returns:
        Nought for a group inside a node.
    """
    if nodes < 2:
        return 0.0
    if operation == "all_reduce":
        return 2 * (nodes - 1) / nodes
    if operation == "all_to_all":
        return (nodes - 1) / nodes * ranks / nodes
    if operation in SHARED:
        return (nodes - 1) / nodes
    if operation in ("send_recv", "sendrecv"):  # rank i with rank i + half: all of a node's ranks cross
        return ranks / nodes
    return 1.0


@dataclass(frozen=True)
class CostModel:
    """Time of an algorithm: `latencies`·α + `volume`·size·β."""

    name: str
    """What the algorithm is called."""

    latencies: float
    """Messages one after the other."""

    volume: float
    """Bytes that pass through the busiest rank, per byte of size."""

    def seconds(self, size: float, alpha: float, beta: float) -> float:
        """Time for `size` bytes; α in seconds, β in seconds a byte."""
        return self.latencies * alpha + self.volume * size * beta


def ring(ranks: int) -> CostModel:
    """Ring all-reduce: 2(p-1)α + 2((p-1)/p)nβ."""
    return CostModel("ring", 2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def rabenseifner(ranks: int) -> CostModel:
    """Reduce-scatter by halving, all-gather by doubling: 2·lg p·α + 2((p-1)/p)nβ."""
    return CostModel("Rabenseifner", 2 * math.log2(ranks), 2 * (ranks - 1) / ranks)


def recursive_doubling(ranks: int) -> CostModel:
    """Recursive doubling all-reduce: lg p(α + nβ)."""
    return CostModel("recursive doubling", math.log2(ranks), math.log2(ranks))


def model_of(operation: str, backend: str, ranks: int) -> CostModel:
    """The algorithm that a backend is taken to use for long messages.

    Args:
        operation: one of `OPERATIONS`.
        backend: `gloo`, `raw_gloo`, `mpi`, `raw_mpi`, `nccl`; others are taken for rings.
        ranks: of the group, at least 2.
    """
    rounds, passed = math.ceil(math.log2(ranks)), (ranks - 1) / ranks
    by_mpi = backend in ("mpi", "raw_mpi")
    if operation in POINT_TO_POINT:
        return CostModel("one message", 1, 1)
    if operation == "barrier":
        return CostModel("dissemination", rounds, 0)
    if operation == "all_reduce":
        return rabenseifner(ranks) if by_mpi else ring(ranks)
    if operation == "broadcast":
        if by_mpi and ranks > 2:
            return CostModel("scatter and all-gather", rounds + ranks - 1, 2 * passed)
        return CostModel("binomial tree", rounds, rounds)
    if operation == "reduce":
        if by_mpi and ranks > 2:
            return CostModel("reduce-scatter and gather", 2 * math.log2(ranks), 2 * passed)
        return (
            CostModel("ring and gather", 2 * (ranks - 1), 2 * passed) if ranks > 2 else CostModel("one message", 1, 1)
        )
    if operation in ("gather", "scatter") and by_mpi:
        return CostModel("binomial tree", rounds, passed)
    return CostModel("ring" if operation in ("all_gather", "reduce_scatter") else "pairwise", ranks - 1, passed)
