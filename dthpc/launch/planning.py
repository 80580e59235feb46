"""From the configuration to the launch plan: all that the keeper needs, decided once, before anything is submitted."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf.errors import MissingMandatoryValue

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.launch import containers
from dthpc.launch.allocation import fit
from dthpc.launch.mpi import MpiStart, plan_mpi
from dthpc.launch.placing import threads_of
from dthpc.launch.request import Request, read_request
from dthpc.launch.sbatch import sbatch_options, srun_options
from dthpc.launch.site import Decisions, Site, derive
from dthpc.parallel.layout import Layout
from dthpc.placement.plan.wanted import wanted_of
from dthpc.rundir import RunDir


@dataclass(frozen=True)
class RankRow:
    """Where one rank goes."""

    rank: int
    node: int
    """Number of the node among those of the attempt, from 0."""

    local_rank: int
    cores: int
    threads: int
    gpus: list[int]
    """Indices of its GPUs among those of its node."""


def make_plan(cfg: Any, run: RunDir, site: Site | None = None, env: Mapping[str, str] = os.environ) -> LaunchPlan:
    """The launch plan of a run.

    Args:
        cfg: the configuration.
        run: the run's folder; nothing is written to it.
        site: the Slurm site; `None` for a local run.
        env: the environment, for runs inside an allocation.

    Raises:
        UserError: the configuration asks for what can't be planned.
    """
    request = read_request(cfg)
    if request.kind == "allocation":
        request = fit(request, env)
    decisions = derive(site, cfg, request)
    mpi = plan_mpi(cfg, None if site is None else site.mpi_types, env)
    if mpi is not None:
        decisions = replace(decisions, reasons={**decisions.reasons, "mpi": mpi.why})
    python = cfg.cluster.python or sys.executable
    plan = LaunchPlan(
        kind=request.kind,
        nodes=request.nodes,
        max_nodes=request.max_nodes,
        tasks_per_node=request.tasks_per_node,
        cpus_per_task=request.cpus_per_task,
        threads_per_rank=threads_of(cfg, request, env)[0],
        gpus_per_node=request.gpus_per_node,
        rank_command=containers.rank_words(cfg, run, python),
        keeper_command=[python, "-u", "-m", "dthpc.attempt.keeper"],
        srun_options=_srun_options(cfg, run, request, site, mpi),
        mpi={} if mpi is None else mpi.as_dict(),
        environment={**({} if mpi is None else mpi.environment), **_environment(cfg)},
        requeue=decisions.requeue,
        restart_on_failure=bool(cfg.resilience.restart_on_failure),
        max_attempts_without_progress=int(cfg.resilience.max_attempts_without_progress),
        max_attempts=cfg.resilience.max_attempts,
        restart_delay_s=float(cfg.resilience.requeue_delay_s),
        grace_s=decisions.grace_s,
        placement=wanted_placement(cfg, request, env),
        site=_records(site, decisions),
    )
    return _with_batch_script(cfg, run, request, site, decisions, plan) if request.kind == "slurm" else plan


def rank_table(plan: LaunchPlan) -> list[RankRow]:
    """Where each rank goes, on the fewest nodes that the run may get: node by node, as `--distribution=block` says."""
    rows = []
    for rank in range(plan.nodes * plan.tasks_per_node):
        node, local = divmod(rank, plan.tasks_per_node)
        gpus = _gpus_of(local, plan.tasks_per_node, plan.gpus_per_node)
        rows.append(RankRow(rank, node, local, plan.cpus_per_task, plan.threads_per_rank, gpus))
    return rows


def table_as_dicts(rows: list[RankRow]) -> list[dict[str, Any]]:
    """The table for JSON."""
    return [asdict(row) for row in rows]


def _gpus_of(local: int, tasks: int, gpus: int) -> list[int]:
    """The share of one rank, contiguous; fewer GPUs than ranks are shared by neighbours."""
    if gpus == 0:
        return []
    first, last = local * gpus // tasks, (local + 1) * gpus // tasks
    return list(range(first, max(last, first + 1)))


def wanted_placement(cfg: Any, request: Request, env: Mapping[str, str]) -> dict[str, Any]:
    """What the launch plan says of the placement.

    Raises:
        UserError: a value is malformed.
    """
    try:
        layout = Layout.resolve(cfg, request.ranks)
        degrees, order = {axis: layout.degree(axis) for axis in layout.order}, list(layout.order)
    except (UserError, MissingMandatoryValue):
        # The checks tell it; without a layout, ranks are placed by their number.
        degrees, order = {}, []
    threads, _ = threads_of(cfg, request, env)
    return wanted_of(cfg.placement, request.tasks_per_node, request.gpus_per_node, threads, degrees, order)


def _srun_options(cfg: Any, run: RunDir, request: Request, site: Site | None, mpi: MpiStart | None) -> list[str]:
    if request.kind == "local":
        return []
    plugin = None if mpi is None else mpi.plugin
    return [*srun_options(cfg, request, site, plugin), *containers.srun_words(cfg, run)]


def _environment(cfg: Any) -> dict[str, str]:
    given = {str(name): str(value) for name, value in cfg.cluster.environment.items()}
    return {**containers.rank_environment(cfg), **given}


def _records(site: Site | None, decisions: Decisions) -> dict[str, Any]:
    """What was learnt and decided. The keeper reads `save_lead_s` of it, the executor what is added for sbatch."""
    learnt = None if site is None else site.as_dict()
    return {"save_lead_s": decisions.lead_s, "decisions": decisions.as_dict(), "learnt": learnt}


def _with_batch_script(
    cfg: Any, run: RunDir, request: Request, site: Site | None, decisions: Decisions, plan: LaunchPlan
) -> LaunchPlan:
    # submitit is loaded only by those who submit to Slurm.
    from dthpc.launch.slurm_executor import batch_script

    demands = {
        "sbatch": sbatch_options(cfg, run, request, site, decisions),
        "setup": [str(line) for line in cfg.cluster.setup],
        "array_parallelism": int(cfg.cluster.array_parallelism),
    }
    plan = replace(plan, site={**plan.site, **demands})
    return replace(plan, batch_script=batch_script(run, plan))
