"""What a preflight found, as JSON and as a table for people; free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dthpc.errors import UserError
from dthpc.jobs.preflight.judge import METRICS, SKEW, NodeReading, NodeVerdict, judge
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

    def table(self) -> tuple[list[Column], list[list[str]]]:
        """Columns and rows: the best good nodes, and all bad ones."""
        good = [verdict for verdict in self.verdicts if not verdict.bad]
        shown = [*good[:ROWS], *self.bad]
        names = [name for name in _TITLES if any(name in verdict.reading.values for verdict in shown)]
        columns = [Column("place", right=True), Column("node"), Column("verdict"), Column("of median", right=True)]
        columns += [Column(_TITLES[name], right=True) for name in names]
        places = {verdict.node: place for place, verdict in enumerate(self.verdicts, start=1)}
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
        return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]

    def remarks(self) -> list[tuple[str, str]]:
        """What stands below the table, as labels and texts: why nodes are bad, and what to do."""
        left = len(self.verdicts) - len(self.bad) - ROWS
        rows = [("further", f"{left} good nodes more (preflight.json)")] if left > 0 else []
        if "all_reduce_gb_s" in self.group:
            rate, latency = self.group["all_reduce_gb_s"], self.group["all_reduce_us"]
            told = f"{rate:.3g} GB/s over all ranks (bus bandwidth), smallest message {latency:.0f} µs"
            rows.append(("all-reduce", told))
        rows += [("BAD", f"{verdict.node}: {why}") for verdict in self.bad for why in verdict.why]
        rows += _of_all(self.verdicts)
        if self.bad:
            rows.append(("leave out", f"cluster.exclude={self.exclude} for the next submission"))
        elif len(self.verdicts) > 1:
            rows.append(("verdict", f"no node of {len(self.verdicts)} falls behind the others"))
        return rows

    def text(self) -> str:
        """All of it as plain text, for a log."""
        return "\n".join([plain_table(*self.table()), *(f"{label}: {told}" for label, told in self.remarks())])

    def event(self) -> dict[str, Any]:
        """The fields of the event that the last screen of a run is made of."""
        columns, rows = self.table()
        names = ", ".join(verdict.node for verdict in self.bad)
        return {
            "job": "preflight",
            "result": f"bad nodes: {names}" if names else "no bad node",
            "tables": [{"title": "", "columns": [[c.title, c.right] for c in columns], "rows": rows}],
            "rows": [list(row) for row in self.remarks()],
        }


_TITLES = {
    **{metric.name: metric.title for metric in METRICS},
    SKEW: "clock s",
    "run_free_gb": "run free GiB",
    "tmp_free_gb": "tmp free GiB",
}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _of_all(verdicts: Sequence[NodeVerdict]) -> list[tuple[str, str]]:
    """What the doctor says, each sentence once with the nodes that it is true of."""
    rows = []
    for severity in ("errors", "warnings"):
        where: dict[str, list[str]] = {}
        for verdict in verdicts:
            for told in getattr(verdict.reading, severity):
                where.setdefault(told, []).append(verdict.node)
        for told, nodes in where.items():
            more = ", …" if len(nodes) > 8 else ""
            shown = "all nodes" if len(nodes) == len(verdicts) > 1 else ", ".join(nodes[:8]) + more
            rows.append((severity[:-1], f"{told} ({shown})"))
    return rows
