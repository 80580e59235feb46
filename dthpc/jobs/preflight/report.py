"""What a preflight found, as JSON and as a table for people; free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dthpc.errors import UserError
from dthpc.jobs.preflight.judge import FREE, METRICS, SKEW, NodeReading, NodeVerdict, judge
from dthpc.monitor.table import Column, plain_table
from dthpc.slurm.hostlist import compress

SCHEMA = 1
"""Version of `preflight.json`."""

ROWS = 64
"""Most good nodes that the table for people shows; bad ones are all shown."""


@dataclass(frozen=True)
class Report:
    """The verdicts on all nodes."""

    verdicts: Sequence[NodeVerdict]
    """The best node first, bad ones last."""

    group: Mapping[str, float]
    """What is one number for all ranks: `all_reduce_gb_s` (bus bandwidth), `all_reduce_us`."""

    seconds: float
    """How long it took."""

    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, readings: Sequence[NodeReading], group: Mapping[str, float], checks: Any, seconds: float) -> Report:
        """Judge what was found.

        Args:
            readings: of each node.
            group: what is one number for all.
            checks: the thresholds, a `PreflightChecks`.
            seconds: how long it took.
        """
        return cls(judge(readings, checks), group, seconds)

    @property
    def bad(self) -> list[NodeVerdict]:
        return [verdict for verdict in self.verdicts if verdict.bad]

    @property
    def exclude(self) -> str:
        """The bad nodes as a host list; empty where there are none."""
        try:
            return compress(sorted(verdict.node for verdict in self.bad))
        except UserError:  # a name that Slurm would not have given
            return ",".join(sorted(verdict.node for verdict in self.bad))

    def to_json(self) -> dict[str, Any]:
        """For `preflight.json`."""
        return {
            "schema": SCHEMA,
            "time": round(self.time, 3),
            "seconds": round(self.seconds, 3),
            "bad": sorted(verdict.node for verdict in self.bad),
            "exclude": self.exclude,
            "group": dict(self.group),
            "nodes": [{"place": place, **verdict.to_json()} for place, verdict in enumerate(self.verdicts, start=1)],
        }

    def text(self) -> str:
        """For people: the table, why nodes are bad, what to do."""
        lines = [_table(self.verdicts)]
        if "all_reduce_gb_s" in self.group:
            rate, latency = self.group["all_reduce_gb_s"], self.group["all_reduce_us"]
            lines.append(f"all-reduce of all ranks: {rate:.3g} GB/s (bus bandwidth), smallest message {latency:.0f} µs")
        lines += [f"BAD {verdict.node}: {why}" for verdict in self.bad for why in verdict.why]
        lines += _of_all(self.verdicts)
        if self.bad:
            lines.append(f"leave out for the next submission: cluster.exclude={self.exclude}")
        elif len(self.verdicts) > 1:
            lines.append(f"no node of {len(self.verdicts)} falls behind the others")
        return "\n".join(lines)


def _table(verdicts: Sequence[NodeVerdict]) -> str:
    shown = [*[v for v in verdicts if not v.bad][:ROWS], *[v for v in verdicts if v.bad]]
    names = [name for name in (*(m.name for m in METRICS), SKEW, *FREE) if any(name in v.reading.values for v in shown)]
    titles = {metric.name: metric.title for metric in METRICS}
    titles |= {SKEW: "clock s", "run_free_gb": "run free GiB", "tmp_free_gb": "tmp free GiB"}
    columns = [Column("place", right=True), Column("node"), Column("verdict"), Column("of median", right=True)]
    columns += [Column(titles[name], right=True) for name in names]
    places = {verdict.node: place for place, verdict in enumerate(verdicts, start=1)}
    rows = [
        [
            str(places[verdict.node]),
            verdict.node,
            "BAD" if verdict.bad else "ok",
            "" if verdict.relative is None else f"{100 * verdict.relative:.0f} %",
            *(_number(verdict.reading.values.get(name)) for name in names),
        ]
        for verdict in shown
    ]
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    text = plain_table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows])
    left = len(verdicts) - len(shown)
    return f"{text}\n… and {left} good nodes more (preflight.json)" if left else text


def _number(value: float | None) -> str:
    return (
        ""
        if value is None
        else f"{value:.3f}"
        if abs(value) < 0.1
        else f"{value:.3g}"
        if value < 1e4
        else f"{value:.0f}"
    )


def _of_all(verdicts: Sequence[NodeVerdict]) -> list[str]:
    """What the doctor says, each sentence once with the nodes that it is true of."""
    lines = []
    for severity in ("errors", "warnings"):
        where: dict[str, list[str]] = {}
        for verdict in verdicts:
            for told in getattr(verdict.reading, severity):
                where.setdefault(told, []).append(verdict.node)
        for told, nodes in where.items():
            shown = (
                "all nodes" if len(nodes) == len(verdicts) > 1 else ", ".join(nodes[:8]) + (", …" * (len(nodes) > 8))
            )
            lines.append(f"{severity[:-1]} ({shown}): {told}")
    return lines
