"""The dry run: what would be submitted, to the byte, where each rank would go, and what the checks say."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.processes import SrunRanks
from dthpc.launch.planning import RankRow, rank_table, table_as_dicts
from dthpc.launch.verdicts import Verdict, plural
from dthpc.placement.plan.nodes import Plan
from dthpc.placement.plan.offline import planned
from dthpc.placement.table import placement_text
from dthpc.rundir import RunDir

ROWS = 64
"""Most ranks that the printed table shows."""

_MARKS = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


@dataclass(frozen=True)
class Preview:
    """What a launch would do. `plan` is `None` where mistakes leave nothing to plan."""

    run: RunDir
    plan: LaunchPlan | None
    verdicts: Sequence[Verdict]

    @property
    def rows(self) -> list[RankRow]:
        """The rank table."""
        return [] if self.plan is None else rank_table(self.plan)

    @property
    def ranks_command(self) -> list[str]:
        """The words that start the ranks of the next attempt: an `srun`, or one rank's own command for a local run."""
        if self.plan is None:
            return []
        if self.plan.kind == "local":
            return [*self.plan.rank_command, str(self.run.path)]
        attempt = self.run.attempt(max(self.run.attempt_numbers(), default=-1) + 1)
        return SrunRanks(self.run, self.plan, attempt, {"SLURM_JOB_NUM_NODES": str(self.plan.nodes)}).command()

    @property
    def placement(self) -> Plan | None:
        """Where ranks would go on their node, where it is known: this one, or that of `placement.topology`.

        Raises:
            UserError: the topology can't be read, or the ranks do not fit it.
        """
        return None if self.plan is None else planned(self.plan.placement, here=self.plan.kind == "local")

    @property
    def refused(self) -> bool:
        """Whether a check found a mistake."""
        return any(verdict.status == "error" for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "run": str(self.run.path),
            "kind": None if self.plan is None else self.plan.kind,
            "batch_script": None if self.plan is None else self.plan.batch_script,
            "ranks_command": self.ranks_command,
            "environment": {} if self.plan is None else self.plan.environment,
            "ranks": table_as_dicts(self.rows),
            "placement": None if self.placement is None else self.placement.to_json(),
            "site": {} if self.plan is None else self.plan.site,
            "checks": [verdict.as_dict() for verdict in self.verdicts],
            "refused": self.refused,
        }

    def text(self) -> str:
        """For people. The batch script stands unindented between its rules, so that it can be copied as it is."""
        parts = [f"Run      {self.run.name}", f"Folder   {self.run.path}"]
        if self.plan is not None:
            parts += self._launch_lines(self.plan)
        parts += ["", "Checks", *_table([[v.check, _MARKS[v.status], v.note] for v in self.verdicts])]
        parts += ["", "Mistakes were found: nothing would be submitted." if self.refused else "Nothing was submitted."]
        return "\n".join(parts)

    def _launch_lines(self, plan: LaunchPlan) -> list[str]:
        lines = []
        if plan.batch_script is not None:
            lines += ["", "-" * 30 + " batch script " + "-" * 30, plan.batch_script.rstrip("\n"), "-" * 74]
        title = "Each rank" if plan.kind == "local" else "Ranks, started by the keeper inside the job"
        lines += ["", title, f"  {shlex.join(self.ranks_command)}"]
        if plan.environment:
            lines += ["", "Environment of the ranks", *_table([[n, v] for n, v in sorted(plan.environment.items())])]
        decisions = plan.site.get("decisions") or {}
        lines += ["", "Decisions", *_table([[name, why] for name, why in decisions.get("reasons", {}).items()])]
        lines += ["", *_rank_lines(self.rows, plan)]
        placed = self.placement
        return lines if placed is None else [*lines, "", "Placement", *placement_text(placed).splitlines()]


def _rank_lines(rows: list[RankRow], plan: LaunchPlan) -> list[str]:
    more = f", up to {plan.max_nodes * plan.tasks_per_node} on {plan.max_nodes}" if plan.max_nodes > plan.nodes else ""
    title = f"{plural(len(rows), 'rank')} on {plural(plan.nodes, 'node')}{more}"
    head = ["rank", "node", "local", "cores", "threads", "GPUs"]
    cells = [
        [*map(str, (row.rank, row.node, row.local_rank, row.cores, row.threads)), ",".join(map(str, row.gpus)) or "-"]
        for row in rows[:ROWS]
    ]
    rest = [f"  … and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return [title, *_table([head, *cells]), *rest]


def _table(rows: list[list[str]]) -> list[str]:
    """Lines with the cells under each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
