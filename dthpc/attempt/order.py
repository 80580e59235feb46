"""Which nodes come first: ranks are numbered so that those next to each other sit under the same switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.placement.plan.nodes import order_by_switch
from dthpc.rundir import AttemptDir
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.hostlist import expand
from dthpc.slurm.topology import parse_topology, paths_of

BLOCKS = "--distribution=block:block"
"""How ranks are dealt where nothing better is known: node by node, in the order of Slurm's list, which is by name."""

_TIMEOUT_S = 5.0


def order_words(plan: LaunchPlan, env: Mapping[str, str], attempt: AttemptDir, nodes: int) -> list[str]:
    """The options of `srun` that number ranks switch by switch; none where the order by name does so already.

    `srun` sorts the names in `--nodelist`; the order of a list counts only with `--distribution=arbitrary`, and one
    entry stands for one task. So the list is written to a file of the attempt.

    Args:
        plan: of the run.
        env: the keeper's environment.
        attempt: where the list is kept.
        nodes: how many of the allocation's nodes the ranks take.
    """
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not (plan.placement.get("by_switch") and BLOCKS in plan.srun_options and listed and nodes > 2):
        return []
    client = SlurmClient(timeout_s=_TIMEOUT_S, patience_s=_TIMEOUT_S, environment=env)
    given = expand(listed)
    order = ordered(given, client)[:nodes]
    if order == given[:nodes]:
        return []
    path = attempt.path / "nodes-of-ranks.txt"
    path.write_text("".join(f"{node}\n" * plan.tasks_per_node for node in order), encoding="utf-8")
    return ["--distribution=arbitrary", f"--nodelist={path}"]


def ordered(nodes: Sequence[str], client: SlurmClient) -> list[str]:
    """Nodes switch by switch; as they are given where Slurm knows no switches or does not answer."""
    try:
        answer = client.try_once(["scontrol", "show", "topology"])
        above = paths_of(parse_topology(answer.output)) if answer.code == 0 else {}
    except UserError:
        return list(nodes)
    return order_by_switch(nodes, above)
