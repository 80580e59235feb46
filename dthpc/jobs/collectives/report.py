"""The results as JSON, as nccl-tests' table, and as the few rows of the run's last screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dthpc.jobs.collectives.fit import Fit, fit
from dthpc.jobs.collectives.judge import Finding, rate, verdict
from dthpc.jobs.collectives.line import Line
from dthpc.jobs.collectives.matrix import Matrix
from dthpc.jobs.collectives.settings import SCHEMA
from dthpc.jobs.collectives.terms import model_of
from dthpc.monitor.table import Column, plain_table
from dthpc.monitor.units import UNKNOWN, size

Kind = tuple[str, str, str]
"""Group, operation, backend."""


@dataclass
class Results:
    """All that was measured."""

    hosts: list[str]
    """Node of each rank."""

    lines: list[Line] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)
    bisection: list[Line] = field(default_factory=list)
    """Both halves of the ranks exchanging messages, for each backend."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    doubts: list[str] = field(default_factory=list)
    """What is too good to be true."""

    backends: dict[str, str] = field(default_factory=dict)
    """What each is, by name."""

    link_gbps: float | None = None
    link_source: str = "not known"
    """Who says so."""

    largest: int = 0
    """Bytes of the largest message that there is memory for."""

    def kinds(self) -> dict[Kind, list[Line]]:
        """The lines of each group, operation and backend, in the order of measurement."""
        found: dict[Kind, list[Line]] = {}
        for line in self.lines:
            found.setdefault((line.group, line.operation, line.backend), []).append(line)
        return found

    def fits(self) -> dict[Kind, Fit]:
        """α and β of each kind: of the form in other memory where there is one."""
        found = {}
        for kind, lines in self.kinds().items():
            _, operation, backend = kind
            form = min(line.in_place for line in lines)
            points = [(float(line.size), line.p50_us / 1e6) for line in lines if line.in_place == form]
            fitted = fit(model_of(operation, backend, lines[0].ranks), points)
            if fitted is not None:
                found[kind] = fitted
        return found


def to_json(results: Results, settings: dict[str, Any]) -> dict[str, Any]:
    """`collectives.json`. Bandwidths are in GB/s of 10⁹ bytes, times in µs, sizes in bytes.

    `lines` holds one object for each operation, size and form (the fields of `measure.Line`, and `link_share`, the part
    of the link's rate that is reached); `fits` α and β with standard errors; `pairs` the matrices; `bisection` both
    ways over the cut between the halves; `findings` what is slow and where; `result` is `ok`, `slow` or `wrong`.
    """
    return {
        "schema": SCHEMA,
        "result": verdict(results.findings),
        "hosts": results.hosts,
        "backends": results.backends,
        "settings": settings,
        "link": {"gbps": results.link_gbps, "source": results.link_source},
        "largest_message": results.largest,
        "lines": [{**line.to_json(), "link_share": line.link_share(results.link_gbps)} for line in results.lines],
        "fits": [
            {"group": group, "operation": operation, "backend": backend, **asdict(fitted)}
            for (group, operation, backend), fitted in results.fits().items()
        ],
        "pairs": [matrix.to_json() for matrix in results.matrices],
        "bisection": [
            {"backend": line.backend, "size": line.size, "bandwidth": cut(line)} for line in results.bisection
        ],
        "findings": [finding.to_json() for finding in results.findings],
        "doubts": results.doubts,
        "notes": results.notes,
    }


def cut(line: Line) -> float:
    """GB/s over the cut between the halves of the ranks, both ways together."""
    return 2 * (line.ranks // 2) * line.algbw


def full_table(results: Results) -> str:
    """Every line, with nccl-tests' columns; sizes in bytes, times in µs, bandwidths in GB/s."""
    columns = [Column(title) for title in ("group", "backend", "operation")]
    titles = (
        "size",
        "count",
        "type",
        "redop",
        "form",
        "time",
        "algbw",
        "busbw",
        "#wrong",
        "p90",
        "p99",
        "calls",
        "link",
    )
    columns += [Column(title, right=True) for title in titles]
    rows = []
    for line in results.lines:
        share = line.link_share(results.link_gbps)
        rows.append(
            [
                line.group, line.backend, line.operation, str(line.size), str(line.count), line.dtype,
                line.redop or "none", "in" if line.in_place else "out", f"{line.p50_us:.2f}", f"{line.algbw:.3f}",
                f"{line.busbw:.3f}", "N/A" if line.wrong is None else str(line.wrong), f"{line.p90_us:.2f}",
                f"{line.p99_us:.2f}", str(line.iterations), "" if share is None else f"{share:.2f}",
            ]
        )  # fmt: skip
    return plain_table(columns, rows) + "\n"


def summary_table(results: Results) -> dict[str, Any]:
    """A row for each group, operation and backend: latency, best bus bandwidth, fit, and what of the link is used."""
    columns = [["group", False], ["operation", False], ["backend", False], ["size", True], ["p50 µs", True]]
    columns += [["p99 µs", True], ["best busbw", True], ["at", True], ["of link", True], ["of raw", True]]
    columns += [["α µs", True], ["1/β", True], ["#wrong", True]]
    kinds, fits = results.kinds(), results.fits()
    rows = [_summary_row(kind, kinds, fits.get(kind), results.link_gbps) for kind in sorted(kinds, key=_order(results))]
    return {"columns": columns, "rows": rows}


def _order(results: Results) -> Any:
    groups = list(dict.fromkeys(line.group for line in results.lines))
    operations = list(dict.fromkeys(line.operation for line in results.lines))
    backends = list(dict.fromkeys(line.backend for line in results.lines))
    return lambda kind: (groups.index(kind[0]), operations.index(kind[1]), backends.index(kind[2]))


def _summary_row(kind: Kind, kinds: dict[Kind, list[Line]], fitted: Fit | None, link: float | None) -> list[str]:
    lines = kinds[kind]
    first, best = lines[0], max(lines, key=lambda line: line.busbw)
    share = best.link_share(link)
    wrong = [line.wrong for line in lines if line.wrong is not None]
    moves = kind[1] != "barrier"
    return [
        *kind,
        size(first.size) if moves else "",
        f"{first.p50_us:.1f}",
        f"{first.p99_us:.1f}",
        rate(best.busbw) if moves else "",
        size(best.size) if moves else "",
        "" if share is None else f"{share:.0%}",
        _of_raw(kind, kinds),
        "" if fitted is None else f"{fitted.alpha_us:.1f} ± {fitted.alpha_error_us:.1f}",
        "" if fitted is None or fitted.bandwidth is None else rate(fitted.bandwidth),
        str(sum(wrong)) if wrong else UNKNOWN,
    ]


def _of_raw(kind: Kind, kinds: dict[Kind, list[Line]]) -> str:
    """Time of the largest size over that of the raw library, in the same form."""
    raw = kinds.get((kind[0], kind[1], f"raw_{kind[2]}"))
    if raw is None:
        return ""
    times = {(line.size, line.in_place): line.p50_us for line in raw}
    both = [line for line in kinds[kind] if (line.size, line.in_place) in times]
    if not both:
        return ""
    last = both[-1]
    return f"{last.p50_us / times[last.size, last.in_place]:.2f} ×"


def pair_tables(matrices: Sequence[Matrix], most: int = 16) -> list[dict[str, Any]]:
    """Bandwidths of pairs for the screen; larger matrices are in the files only."""
    tables = []
    for matrix in matrices:
        if len(matrix.labels) > most:
            continue
        columns = [["from \\ to", False], *([label, True] for label in matrix.labels)]
        rows = [
            [sender, *(_cell(matrix, a, b) for b in range(len(matrix.labels)))]
            for a, sender in enumerate(matrix.labels)
        ]
        title = f"pairs, {matrix.name}, {matrix.backend}, {size(matrix.size)}"
        tables.append({"title": title, "columns": columns, "rows": rows})
    return tables


def _cell(matrix: Matrix, a: int, b: int) -> str:
    value = matrix.bandwidth.get((a, b))
    return UNKNOWN if value is None else rate(value)


def summary_rows(results: Results) -> list[list[str]]:
    """What the last screen says below its tables: labels and texts."""
    rows = [["result", verdict(results.findings)]]
    rows += [["", finding.words] for finding in results.findings]
    rows += [["doubt", doubt] for doubt in results.doubts]
    for line in results.bisection:
        halves = f"between halves of {line.ranks} ranks"
        rows.append(["bisection", f"{rate(cut(line))} both ways {halves}, {size(line.size)} ({line.backend})"])
    link = UNKNOWN if results.link_gbps is None else f"{results.link_gbps:g} Gbit/s"
    rows.append(["link", f"{link} ({results.link_source})"])
    rows += [["left out", note] for note in results.notes]
    return rows
