"""Nodes that a preflight refuses before a job begins its work, and what follows: the job goes on without them.

It can't loop: each attempt that ends so leaves out at least one node more than those before, and where too few would
remain the run stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dthpc.resilience.attempts import Attempt
from dthpc.resilience.decide import Decision, Limits
from dthpc.rundir import AttemptDir, read_json
from dthpc.slurm.hostlist import compress

CAUSE = "bad_nodes"


class BadNodes(Exception):
    """Raised by every rank of a job whose nodes were refused."""

    def __init__(self, why: Mapping[str, str]) -> None:
        """Name the nodes.

        Args:
            why: for each bad node the reason.
        """
        self.why = dict(why)
        super().__init__("preflight refuses " + "; ".join(f"{node}: {reason}" for node, reason in self.why.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return BadNodes, (self.why,)


@dataclass(frozen=True)
class Supply:
    """What there is besides the nodes that were refused."""

    needed: int
    """Nodes that the run needs at least."""

    remaining: int | None
    """Nodes that its partition has besides all that are excluded; `None` where Slurm does not tell."""

    demanded: Collection[str] = ()
    """Nodes that the job must have (`cluster.nodelist`)."""

    where: str = "the partition"


def read_refusal(attempt: AttemptDir) -> dict[str, str]:
    """For each node that the ranks of an attempt refused the reason; empty where they refused none."""
    stored = read_json(attempt.preflight)
    refused = stored.get("refused") if isinstance(stored, dict) else None
    return {str(node): str(why) for node, why in refused.items()} if isinstance(refused, dict) else {}


def refused_before(attempts: Iterable[Attempt]) -> dict[str, str]:
    """The nodes that earlier attempts refused, with the reasons."""
    found: dict[str, str] = {}
    for attempt in attempts:
        nodes = (attempt.end or {}).get("bad_nodes")
        if isinstance(nodes, dict):
            found |= {str(node): str(why) for node, why in nodes.items()}
    return found


def decide_without(refused: Mapping[str, str], history: Iterable[Attempt], supply: Supply, limits: Limits) -> Decision:
    """Whether a job goes on without the nodes that it refused.

    Args:
        refused: for each node the reason.
        history: the earlier attempts of the same chain.
        supply: what there is besides.
        limits: what the configuration allows.
    """
    earlier = list(history)
    names = compress(sorted(refused))
    why = f"preflight refuses {names} ({next(iter(refused.values()))})"
    stop = _why_not(refused, earlier, supply, limits)
    if stop is not None:
        return Decision(CAUSE, "stop", f"{why}; {stop}")
    return Decision(CAUSE, limits.continue_by, f"{why}; goes on without {'it' if len(refused) == 1 else 'them'}")


def _why_not(refused: Mapping[str, str], earlier: list[Attempt], supply: Supply, limits: Limits) -> str | None:
    if not set(refused) - set(refused_before(earlier)):
        return "but had been told to leave out the same nodes before, and was given them again"
    if limits.continue_by == "restart":
        return "the ranks have no other nodes here to start on: leave them out by hand (cluster.exclude)"
    if limits.continue_by == "never":
        return "cluster.requeue=never"
    demanded = sorted(set(refused) & set(supply.demanded))
    if demanded:
        return f"cluster.nodelist demands {compress(demanded)}"
    if supply.remaining is not None and supply.remaining < supply.needed:
        left = f"{supply.where} has {supply.remaining} nodes"
        return f"without all that were refused, {left}, and the run needs {supply.needed}"
    if limits.max_attempts is not None and len(earlier) + 1 >= limits.max_attempts:
        return f"resilience.max_attempts={limits.max_attempts} is used up"
    return None
