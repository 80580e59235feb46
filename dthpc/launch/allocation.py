"""Runs inside an allocation that `salloc` (or a batch job of the user's own) already holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dthpc.errors import UserError
from dthpc.launch.request import Request
from dthpc.launch.verdicts import plural
from dthpc.slurm.hostlist import expand_tasks_per_node
from dthpc.slurm.jobenv import read_environment


def fit(request: Request, env: Mapping[str, str]) -> Request:
    """The request with the number of nodes that the allocation at hand allows.

    Raises:
        UserError: there is no allocation here, or it is too small; the message gives its numbers.
    """
    # salloc's shell may itself be a step (LaunchParameters=use_interactive_step), whose numbers are not the job's.
    job = {name: value for name, value in env.items() if not name.startswith(("SLURM_STEP_", "SLURM_PROCID"))}
    if "SLURM_JOB_ID" not in job:
        raise UserError(
            "this shell is in no Slurm allocation",
            key="cluster.kind",
            value="allocation",
            instead="type the command inside `salloc`, or use +cluster=slurm to submit a batch job",
        )
    allocated = read_environment({name: value for name, value in job.items() if name in _READ})
    nodes = allocated.nnodes or len(allocated.nodes) or 1
    if nodes < request.nodes:
        raise UserError(
            f"the allocation {allocated.job_id} has {plural(nodes, 'node')}",
            key="cluster.nodes",
            value=request.nodes_text,
            instead=f"cluster.nodes={nodes}, or a larger allocation",
        )
    cpus = expand_tasks_per_node(env["SLURM_JOB_CPUS_PER_NODE"]) if "SLURM_JOB_CPUS_PER_NODE" in env else []
    enough = sum(count >= request.cpus_per_node for count in cpus)
    if cpus and enough < request.nodes:
        told = env["SLURM_JOB_CPUS_PER_NODE"]
        raise UserError(
            f"each node runs {request.tasks_per_node} tasks of {request.cpus_per_task} cores, and the allocation has "
            f"{told} CPUs on its nodes, so that {enough} of them are large enough",
            key="cluster.tasks_per_node",
            value=request.tasks_per_node,
            instead=f"tasks and cores that fit {min(cpus)} CPUs, or an allocation with as many CPUs on each node",
        )
    most = min(request.max_nodes, nodes, enough or nodes)
    return replace(request, max_nodes=most, nodes=most)


_READ = frozenset(["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"])
