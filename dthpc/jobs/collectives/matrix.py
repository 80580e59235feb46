"""What all pairs of some members reach; free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dthpc.jobs.collectives.links import Slow


@dataclass
class Matrix:
    """What all pairs of some members reach."""

    name: str
    """`nodes`, or `ranks of HOST`."""

    labels: list[str]
    """Names of the members."""

    backend: str
    size: int
    """Bytes of a message."""

    bandwidth: dict[tuple[int, int], float] = field(default_factory=dict)
    """GB/s from one member to another, by their places among the labels: of the quickest message."""

    latency_us: dict[tuple[int, int], float] = field(default_factory=dict)
    """Half a round trip of 8 bytes, the median, for pairs (a, b) with a < b."""

    slow: list[Slow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For `collectives.json`: rows are senders, columns receivers, the diagonal is null."""
        every = range(len(self.labels))
        return {
            "name": self.name,
            "labels": self.labels,
            "backend": self.backend,
            "size": self.size,
            "bandwidth": [[self.bandwidth.get((a, b)) for b in every] for a in every],
            "latency_us": [[self.latency_us.get((min(a, b), max(a, b))) for b in every] for a in every],
            "slow": [
                {
                    "kind": each.kind,
                    "members": [self.labels[member] for member in each.members],
                    "direction": each.direction,
                    "bandwidth": each.bandwidth,
                    "expected": each.expected,
                }
                for each in self.slow
            ],
        }
