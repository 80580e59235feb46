"""The table of layouts and their largest deviations, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from tests.proof.cases import Case, covered
from tests.proof.compare import Deviation, limit_of

TABLE_MARK = "<!-- table: python -m tests.proof --table docs/layouts.md -->"


def table(results: Mapping[Case, Deviation]) -> str:
    """What each group of layouts deviates at most, and every layout, in Markdown."""
    cases = list(results)
    lines = [
        f"{len(cases)} layouts on 1 to {max(case.ranks for case in cases)} ranks; of the sets of features that go "
        "together, they have {} of {} pairs and {} of {} triples.".format(*covered(cases, 2), *covered(cases, 3)),
        "",
        "| arithmetic | layouts | loss | norm | parameters | limits |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for arithmetic in ("fp32", "bf16", "fp16"):
        group = {case: found for case, found in results.items() if case.arithmetic == arithmetic}
        if not group:
            continue
        limit = limit_of(next(iter(group)))
        largest = [max(getattr(found, what) for found in group.values()) for what in ("loss", "norm", "parameters")]
        limits = ", ".join(f"{value:.0e}" for value in (limit.loss, limit.norm, limit.parameters))
        lines.append(f"| {arithmetic} | {len(group)} | {_cells(*largest)} | {limits} |")
    lines += ["", "| layout | ranks | loss | norm | parameters | parameter that deviates most |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    for case, found in results.items():
        numbers = _cells(found.loss, found.norm, found.parameters)
        lines.append(f"| {case} | {case.ranks} | {numbers} | `{found.worst}` |")
    return "\n".join(lines) + "\n"


def _cells(*values: float) -> str:
    return " | ".join(f"{value:.1e}" for value in values)
