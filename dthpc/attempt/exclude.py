"""How a job goes on without nodes that it refused.

Seen on Slurm 22.05: `scontrol update ExcNodeList=` fails on a running job ("Job is no longer pending execution") and
works as soon as `scontrol requeue` has returned: the job is pending then, though its processes still run. They get
SIGTERM meanwhile, so that the command that follows must not hear it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.requeue import job_name
from dthpc.errors import UserError
from dthpc.resilience.bad_nodes import Supply
from dthpc.slurm.client import SlurmClient, SlurmError
from dthpc.slurm.hostlist import compress, expand

_DEAF = ["sh", "-c", 'trap "" TERM CONT HUP USR2; exec "$@"', "sh"]
"""Starts a command that ignores what ends the job; an ignored signal stays ignored over `exec`."""


def all_excluded(plan: LaunchPlan, refused: Iterable[str]) -> list[str]:
    """The nodes that the user excluded and those that were refused, each once."""
    return list(dict.fromkeys([*_listed(plan, "exclude"), *sorted(refused)]))


def supply_of(client: SlurmClient, plan: LaunchPlan, env: Mapping[str, str], refused: Iterable[str]) -> Supply:
    """What Slurm has for the job besides the nodes that it refused.

    Args:
        client: asks Slurm.
        plan: of the run.
        env: the keeper's environment.
        refused: by this attempt and all before.
    """
    name = env.get("SLURM_JOB_PARTITION", "")
    demanded = _listed(plan, "nodelist")
    try:
        record = next(partition for partition in client.partitions() if partition.name == name)
        nodes = set(expand(record.nodes)) - set(all_excluded(plan, refused))
    except (UserError, StopIteration):
        return Supply(plan.nodes, None, demanded)
    return Supply(plan.nodes, len(nodes), demanded, f"partition {name}")


def exclude_requeued(client: SlurmClient, env: Mapping[str, str], nodes: Iterable[str]) -> None:
    """Tell Slurm which nodes a job that was just requeued must not get.

    Raises:
        SlurmError: Slurm refused, or did not answer.
    """
    command = ["scontrol", "update", f"JobId={job_name(env)}", f"ExcNodeList={compress(nodes)}"]
    # Said twice, it means the same.
    answer = client.query([*_DEAF, *command])
    if answer.code != 0:
        raise SlurmError(command, answer.said, "the job is queued again, and may get the same nodes")


def _listed(plan: LaunchPlan, option: str) -> list[str]:
    text = (plan.site.get("sbatch") or {}).get(option)
    try:
        return expand(str(text)) if text else []
    except UserError:
        return []
