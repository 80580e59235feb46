"""One line of the table, and what a list of times comes to; free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of the table: an operation of one size over one backend in the groups of one division."""

    backend: str
    group: str
    ranks: int
    """Of each group."""

    groups: int
    """Groups that were measured at the same time; times are those of the slowest."""

    nodes: int
    """Nodes that a group is on."""

    operation: str
    size: int
    """Bytes, as nccl-tests counts them."""

    count: int
    """Elements of a rank's share, or of the whole where there are no shares."""

    dtype: str
    redop: str | None
    in_place: bool
    iterations: int
    mean_us: float
    min_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    algbw: float
    """GB/s (10⁹ bytes), from the median time."""

    busbw: float
    """GB/s (10⁹ bytes), from the median time."""

    link_load: float
    """Bytes that must cross the busiest node's link for each byte of size, over all groups; 0 inside a node."""

    wrong: int | None
    """Elements of all results that were not what must come out; None where that was not looked at."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two lines that can be compared have in common."""
        named = (self.backend, self.group, self.ranks, self.nodes, self.operation, self.size)
        return (*named, self.dtype, self.redop, self.in_place)

    def link_share(self, link_gbps: float | None) -> float | None:
        """Part of the rate of a node's link that is reached; None inside a node, and where the rate is not known."""
        if link_gbps is None or not self.link_load:
            return None
        return self.algbw * self.link_load / (link_gbps / 8)

    def to_json(self) -> dict[str, Any]:
        """For `collectives.json`."""
        return asdict(self)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
