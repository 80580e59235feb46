"""The placement that a launch plan would lead to, on a node that can be read before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dthpc.errors import raise_together
from dthpc.placement.plan.nodes import Plan, decide_nodes
from dthpc.placement.plan.unmet import unmet
from dthpc.placement.plan.wanted import wish_of


def planned(wanted: Mapping[str, Any], here: bool) -> Plan | None:
    """The placement of one node's ranks; `None` where nothing is known of the node or nothing is wanted.

    Args:
        wanted: what `dthpc.placement.plan.wanted.wanted_of` made.
        here: whether the ranks run on this machine.

    Raises:
        UserError: the topology can't be read, the ranks do not fit it, or it lacks what is asked.
    """
    if not wanted or not (here or wanted["topology"]):
        return None
    wish = wish_of(wanted)
    if wanted["topology"]:
        from dthpc.placement.read.recognise import read_path

        topology = read_path(wanted["topology"])
    else:
        from dthpc.placement.read.live import read_live

        topology = read_live(tools=wish.gpus != 0)
    plan = decide_nodes([(topology.host or "node", topology)], wish)
    raise_together(unmet(topology, wish, plan.nodes[0][1]))
    return plan
