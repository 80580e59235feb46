"""The first phase of a training job: its nodes are examined for a few seconds, and bad ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dthpc.jobs.preflight.examine import examine
from dthpc.resilience.bad_nodes import BadNodes
from dthpc.rundir import write_json

if TYPE_CHECKING:
    from dthpc.context import RankContext


def refuse_bad_nodes(config: Any, context: RankContext) -> None:
    """Examine the nodes where `resilience.preflight` asks for it and there are several; collective.

    Args:
        config: the whole configuration.
        context: this rank.

    Raises:
        BadNodes: a node would hold the others up. The attempt's folder says which, so that the keeper asks for others.
    """
    if not config.resilience.preflight or context.identity.nodes < 2:
        return
    report = examine(config.resilience.checks, context)
    why = {verdict.node: "; ".join(verdict.why) for verdict in report.bad}
    if context.events is not None:
        print(report.text(), flush=True)
        # Before anybody ends: the keeper decides by this file.
        write_json(context.attempt.preflight, {"refused": why, **report.to_json()})
        for node, reason in why.items():
            context.events.write("incident", what="bad node", node=node, why=reason)
        seconds = round(report.seconds, 1)
        text = f"preflight: {len(why) or 'none'} of {len(report.verdicts)} nodes bad, {seconds:g} s"
        context.events.write("preflight", nodes=len(report.verdicts), bad=list(why), seconds=seconds, text=text)
    if why:
        raise BadNodes(why)
