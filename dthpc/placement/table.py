"""The placement as a table: rank, node, GPU, cores, memory node, NIC, and why; for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, TextIO

from dthpc.monitor.table import Column, plain_table, print_lines, print_table
from dthpc.placement.cpuset import format_cpus
from dthpc.placement.plan.nodes import Plan
from dthpc.placement.plan.places import NicChoice, NodePlan, RankPlace

ROWS = 64
"""Most ranks that the table for people shows."""

COLUMNS = (
    Column("rank", right=True),
    Column("node"),
    Column("GPU"),
    Column("cores"),
    Column("helpers"),
    Column("NUMA"),
    Column("NIC"),
    Column("why", fold=True),
)


def print_placement(out: TextIO, plan: Plan) -> None:
    """Print the table and the notes, with `rich` on a terminal."""
    print_table(out, COLUMNS, cells(plan))
    for line in remarks(plan):
        print_lines(out, line)


def placement_text(plan: Plan) -> str:
    """The same as plain text."""
    rows = cells(plan)
    kept = [index for index in range(len(COLUMNS)) if any(row[index] for row in rows)]
    shown = plain_table([COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows])
    return "\n".join([shown, *remarks(plan)])


def cells(plan: Plan) -> list[list[str]]:
    """Cells of the first `ROWS` ranks; which rank has which place is left open where the GPUs tell that."""
    by_gpu = {name for name, node in plan.nodes if node.by_gpu}
    rows = islice(plan.rows(), ROWS)
    return [_cells("" if node in by_gpu else str(rank), node, place) for rank, node, place in rows]


def remarks(plan: Plan) -> list[str]:
    """What the table does not show: ranks left out, and what the decision costs or leaves."""
    ranks = sum(len(node.places) for _, node in plan.nodes)
    lines = [f"… and {ranks - ROWS} ranks more"] if ranks > ROWS else []
    for kind in plan.kinds:
        names = [name for name, node in plan.nodes if node is kind]
        where = f"{names[0]}: " if len(names) < len(plan.nodes) else ""
        told = ["each rank has the place of the GPUs that it is shown"] if kind.by_gpu else []
        lines += [f"{where}{note}" for note in (*told, *kind.notes, *_left(kind))]
    return lines


def rows_as_dicts(plan: Plan) -> Iterable[dict[str, Any]]:
    """One dictionary a rank, for JSON."""
    for rank, node, place in plan.rows():
        yield {"rank": rank, "node": node, **place.to_json()}


def _cells(rank: str, node: str, place: RankPlace) -> list[str]:
    compute = place.cpus if place.compute is None else place.compute
    return [
        rank,
        node,
        ",".join(unit.name for unit in place.units),
        "" if compute is None else format_cpus(compute),
        format_cpus(place.helpers or ()),
        "" if place.memory is None else ",".join(map(str, place.memory)),
        ",".join(map(_nic, place.nics)),
        reasons(place),
    ]


def reasons(place: RankPlace) -> str:
    """Why a rank is where it is, in one line."""
    named = {"gpu": "GPU ", "memory": "memory: ", "nic": "NIC "}
    shown = {what: why for what, why in place.why.items() if not (what == "memory" and why.startswith("that of"))}
    if not place.units:
        shown.pop("gpu", None)
    if not place.nics:
        shown.pop("nic", None)
    return "; ".join(named.get(what, "") + why for what, why in shown.items())


def _nic(choice: NicChoice) -> str:
    ports = "".join(f":{port}" for port in choice.ports[:1]) if len(choice.ports) == 1 else ""
    return f"{choice.nic.name}{ports}{'' if choice.near else ' (far)' if choice.level else ''}"


def _left(plan: NodePlan) -> list[str]:
    lines = []
    if plan.reserved:
        lines.append(f"left alone on request: CPUs {format_cpus(plan.reserved)}")
    if plan.spare:
        lines.append(f"no rank has cores {format_cpus(plan.spare)}")
    return lines
