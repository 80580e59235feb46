"""What was asked by number and can't be had on a node, although a plan could be made without it."""

from __future__ import annotations

from collections.abc import Iterator

from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus
from dthpc.placement.plan.places import NodePlan
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Topology


def unmet(topology: Topology, wish: Wish, plan: NodePlan) -> Iterator[UserError]:
    """One error for each demand that the plan does not meet.

    Args:
        topology: of the node.
        wish: what was asked.
        plan: what it led to.
    """
    known = topology.existing
    strange = wish.reserved - known if known is not None else frozenset()
    if strange:
        why = f"the node has no CPUs {format_cpus(strange)}"
        instead = f"CPUs among {format_cpus(known or ())}"
        yield UserError(why, key="placement.reserve", value=format_cpus(wish.reserved), instead=instead)
    most = max(len(place.nics) for place in plan.places)
    if wish.nics is not None and wish.nics > most:
        why = f"no rank can have more than {most} of the node's NICs"
        yield UserError(why, key="placement.nics", value=wish.nics, instead=f"placement.nics={max(most, 1)}, or null")
    cores = max((place.cores for place in plan.places), default=0)
    if wish.helpers and cores and wish.helpers >= cores:
        why = f"a rank's share is {cores} cores, one of which at least computes"
        instead = f"placement.helpers={cores - 1}, or fewer ranks"
        yield UserError(why, key="placement.helpers", value=wish.helpers, instead=instead)
