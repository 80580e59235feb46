"""Invented results for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from dthpc.jobs.collectives.line import Line
from dthpc.jobs.collectives.links import find_slow
from dthpc.jobs.collectives.matrix import Matrix


def line(operation: str, size: int, us: float, **changes: Any) -> Line:
    """One of two ranks on two nodes."""
    algbw = size / us / 1e3
    fields: dict[str, Any] = {
        "backend": "gloo", "group": "world", "ranks": 2, "groups": 1, "nodes": 2, "operation": operation, "size": size,
        "count": size // 4, "dtype": "fp32", "redop": None, "in_place": False, "iterations": 5, "mean_us": us,
        "min_us": us, "p50_us": us, "p90_us": us, "p99_us": us, "algbw": algbw, "busbw": algbw, "link_load": 1.0,
        "wrong": 0,
    }  # fmt: skip
    return Line(**{**fields, **changes})


def matrix(slow_node: int | None = None, members: int = 4) -> Matrix:
    """Nodes that reach 1 GB/s, one of which may reach a tenth of it."""
    made = Matrix("nodes", [f"n{number}" for number in range(members)], "gloo", 4 << 20)
    for a in range(members):
        for b in range(members):
            if a != b:
                made.bandwidth[a, b] = 0.1 if slow_node in (a, b) else 1.0
                made.latency_us[min(a, b), max(a, b)] = 20.0
    made.slow = find_slow(members, made.bandwidth, 0.8)
    return made
