"""The job `preflight`: examines every node of its allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError
from dthpc.jobs.preflight.examine import examine
from dthpc.rundir import write_json

if TYPE_CHECKING:
    from dthpc.context import RankContext


def run(config: Any, context: RankContext) -> None:
    """Examine the nodes; the first rank prints the table and leaves `preflight.json` and events in the run's folder.

    Args:
        config: the whole configuration; `config.job` holds the fields of `PreflightJob`.
        context: this rank; `torch.distributed` is initialised.

    Raises:
        UserError: a node is bad, and `job.fail` is set.
    """
    report = examine(config.job, context)
    if context.events is not None:
        write_json(context.run.preflight, {"run": context.run.name, **report.to_json()})
        print(report.text(), flush=True)
        for verdict in report.bad:
            context.events.write("incident", what="bad node", node=verdict.node, why="; ".join(verdict.why))
        context.events.write("report", **report.event(), seconds=round(report.seconds, 1))
    if report.bad and config.job.fail:
        raise UserError(
            f"{report.exclude} would hold the others up: {report.bad[0].why[0]}",
            key="job.fail",
            value=True,
            instead=f"cluster.exclude={report.exclude} or cluster.exclude=preflight:{context.run.name} for other runs",
        )
