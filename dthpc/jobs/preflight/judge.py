"""Which nodes are bad: each measurement against the median of nodes of the same kind, by rules that spare mere noise.

A value is an outlier if its modified z-score, made of the median and the median absolute deviation, is beyond a cutoff
(Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993: 3.5), and it also lies below the median by a share
that matters: where all nodes are alike to a percent, two percent are an outlier and no trouble. Rates are compared by
their logarithms, so that "half as fast" counts the same on any node. Free of torch.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SIGMA = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""

_FASTEST = 1e12


@dataclass(frozen=True)
class Metric:
    """One measurement of a node."""

    name: str
    title: str
    """With its unit, as a table's heading."""

    tolerance: str
    """The field of `PreflightChecks` that says by which share a node may fall behind."""

    less_is_better: bool = False


METRICS = (
    Metric("cpu_gflops", "CPU GFLOP/s", "compute_tolerance"),
    Metric("gpu_tflops", "GPU TFLOP/s", "compute_tolerance"),
    Metric("memory_gb_s", "memory GB/s", "memory_tolerance"),
    Metric("gpu_memory_gb_s", "GPU memory GB/s", "memory_tolerance"),
    Metric("pair_gb_s", "pair GB/s", "network_tolerance"),
    Metric("run_write_mb_s", "run write MB/s", "files_tolerance"),
    Metric("run_read_mb_s", "run read MB/s", "files_tolerance"),
    Metric("run_metadata_ms", "run metadata ms", "files_tolerance", less_is_better=True),
    Metric("tmp_write_mb_s", "tmp write MB/s", "files_tolerance"),
    Metric("tmp_read_mb_s", "tmp read MB/s", "files_tolerance"),
    Metric("tmp_metadata_ms", "tmp metadata ms", "files_tolerance", less_is_better=True),
)
"""Measurements that are compared. The slowest rank of a node speaks for it: the others wait for that one."""

FREE = {"run_free_gb": "the run's folder", "tmp_free_gb": "TMPDIR"}
"""Room, which is held against a number and not against other nodes'."""

SKEW = "clock_s"


@dataclass(frozen=True)
class NodeReading:
    """What was found on one node."""

    node: str
    kind: str
    """Models of its processors and GPUs: only nodes of one kind are compared."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By name of the metric; `clock_s` is the node's clock less that of the first rank's."""

    errors: Sequence[str] = ()
    """What the doctor, or a measurement that failed, calls an error."""

    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class NodeVerdict:
    """How a node compares."""

    reading: NodeReading
    relative: float | None
    """Its worst measurement as a share of the median of its kind; `None` where nothing can be compared."""

    worst: str | None
    """Name of that measurement."""

    why: tuple[str, ...]
    """Why it is bad; empty for a good one."""

    @property
    def node(self) -> str:
        return self.reading.node

    @property
    def bad(self) -> bool:
        return bool(self.why)

    def to_json(self) -> dict[str, Any]:
        """For `preflight.json`."""
        return {
            "node": self.node,
            "bad": self.bad,
            "why": list(self.why),
            "relative": self.relative,
            "worst": self.worst,
            "kind": self.reading.kind,
            "values": dict(self.reading.values),
            "errors": list(self.reading.errors),
            "warnings": list(self.reading.warnings),
        }


def judge(readings: Sequence[NodeReading], checks: Any) -> list[NodeVerdict]:
    """The verdict on each node, the best one first, bad ones last.

    Args:
        readings: of each node.
        checks: the thresholds, a `PreflightChecks`.
    """
    why: dict[str, list[str]] = {reading.node: [] for reading in readings}
    shares: dict[str, dict[str, float]] = {reading.node: {} for reading in readings}
    for kind in dict.fromkeys(reading.kind for reading in readings):
        alike = [reading for reading in readings if reading.kind == kind]
        for metric in METRICS:
            _compare(metric, alike, checks, why, shares)
    for problem in (_errors_of_few, _room(checks), _skew(checks)):
        for node, told in problem(readings):
            why[node].append(told)
    verdicts = [_verdict(reading, shares[reading.node], tuple(why[reading.node])) for reading in readings]
    return sorted(verdicts, key=lambda verdict: (verdict.bad, -(1.0 if verdict.relative is None else verdict.relative)))


def outliers(rates: Mapping[str, float], tolerance: float, z: float, two_factor: float) -> dict[str, float]:
    """Names whose rate lies too far below the others', each with its share of the median.

    Args:
        rates: more is better; all positive.
        tolerance: share of the median by which one may lie below it.
        z: modified z-score from which one is an outlier.
        two_factor: of two alone, the factor by which the slower one must fall behind.
    """
    if len(rates) == 2:
        (fast, slow) = sorted(rates, key=lambda name: -rates[name])
        share = rates[slow] / rates[fast]
        return {slow: share} if share * two_factor <= 1 else {}
    if len(rates) < 3:
        return {}
    logs = {name: math.log(rate) for name, rate in rates.items()}
    middle = statistics.median(logs.values())
    deviation = SIGMA * statistics.median(abs(value - middle) for value in logs.values())
    least = max(z * deviation, -math.log1p(-min(tolerance, 0.999)))
    return {name: math.exp(value - middle) for name, value in logs.items() if middle - value > least}


def _compare(
    metric: Metric,
    alike: Sequence[NodeReading],
    checks: Any,
    why: dict[str, list[str]],
    shares: dict[str, dict[str, float]],
) -> None:
    values = {reading.node: reading.values[metric.name] for reading in alike if metric.name in reading.values}
    rates = {
        node: min(1 / max(v, 1e-9), _FASTEST) if metric.less_is_better else max(v, 1e-9) for node, v in values.items()
    }
    if len(rates) < 2 or (metric.name == "pair_gb_s" and len(rates) == 2):
        # Of one link between two nodes, neither end is to blame.
        return
    middle = statistics.median(rates.values())
    for node, rate in rates.items():
        shares[node][metric.name] = rate / middle
    for node in outliers(rates, getattr(checks, metric.tolerance), checks.outlier_z, checks.two_nodes_factor):
        usual = statistics.median(value for other, value in values.items() if other != node)
        why[node].append(f"{metric.title}: {values[node]:.3g}, the others {usual:.3g}")


def _errors_of_few(readings: Sequence[NodeReading]) -> list[tuple[str, str]]:
    """Errors that some nodes have and others not: what all have is the site's way, and no node to leave out for."""
    counts: dict[str, int] = {}
    for reading in readings:
        for what in {_bare(error) for error in reading.errors}:
            counts[what] = counts.get(what, 0) + 1
    return [
        (reading.node, error)
        for reading in readings
        for error in reading.errors
        if counts[_bare(error)] < len(readings)
    ]


def _bare(error: str) -> str:
    """An error without the numbers that differ from node to node."""
    return re.sub(r"\d+(?:\.\d+)?", "#", error)


_Problems = Callable[[Sequence[NodeReading]], "list[tuple[str, str]]"]


def _room(checks: Any) -> _Problems:
    def find(readings: Sequence[NodeReading]) -> list[tuple[str, str]]:
        found = []
        for name, where in FREE.items():
            short = [reading for reading in readings if reading.values.get(name, math.inf) < checks.free_gb]
            for reading in short if len(short) < len(readings) else ():
                found.append((reading.node, f"{where} has {reading.values[name]:.2f} GiB free"))
        return found

    return find


def _skew(checks: Any) -> _Problems:
    def find(readings: Sequence[NodeReading]) -> list[tuple[str, str]]:
        clocks = {reading.node: reading.values[SKEW] for reading in readings if SKEW in reading.values}
        if len(clocks) < 3:
            return []  # of two clocks, either may be the wrong one
        middle = statistics.median(clocks.values())
        return [
            (node, f"its clock differs by {clock - middle:+.2f} s")
            for node, clock in clocks.items()
            if abs(clock - middle) > checks.clock_skew_s
        ]

    return find


def _verdict(reading: NodeReading, shares: Mapping[str, float], why: tuple[str, ...]) -> NodeVerdict:
    worst = min(shares, key=lambda name: shares[name], default=None)
    return NodeVerdict(reading, None if worst is None else shares[worst], worst, why)
