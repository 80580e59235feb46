"""Checks that need the machine or the site: made on the login node, all of them, before anything is submitted."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dthpc.errors import UserError, UserErrors, nearest
from dthpc.jobs.preflight.options import examines
from dthpc.launch import containers
from dthpc.launch.allocation import fit
from dthpc.launch.checks import layout_verdicts
from dthpc.launch.dependencies import dependency_text, unknown_jobs
from dthpc.launch.mpi import plan_mpi
from dthpc.launch.placing import placement_verdicts
from dthpc.launch.planning import wanted_placement
from dthpc.launch.request import Request, try_request
from dthpc.launch.sbatch import option_mistakes, unknown_options
from dthpc.launch.site import EARLY_S, NodeShape, Site, derive, unknown_partitions
from dthpc.launch.storage import storage_verdicts
from dthpc.launch.verdicts import Verdict, error, ok, plural, warning
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.hostlist import compress, expand
from dthpc.slurm.mpi_types import why_unloadable
from dthpc.slurm.records import PartitionRecord
from dthpc.slurm.units import seconds_to_time

_SUBJECTS = {"time": "cluster.time", "nodes": "cluster.nodes"}


@dataclass(frozen=True)
class _Case:
    """What all checks look at."""

    cfg: Any
    request: Request
    site: Site | None
    env: Mapping[str, str]
    client: SlurmClient


def check_launch(
    cfg: Any,
    site: Site | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    client: SlurmClient | None = None,
) -> list[UserError]:
    """Every mistake that shows on the login node.

    Args:
        cfg: the configuration.
        site: the Slurm site; `None` for local runs.
        env: the environment.
        client: runs Slurm's commands.
    """
    found = (verdict.error for verdict in judge_launch(cfg, site, env=env, client=client))
    return [one for one in found if one is not None]


def judge_launch(
    cfg: Any,
    site: Site | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    client: SlurmClient | None = None,
) -> list[Verdict]:
    """The verdict of every check, in the order in which a reader asks: what, where, how much, how it goes on."""
    request, errors = try_request(cfg)
    case = _Case(cfg, request, site, env, client or SlurmClient(environment=env))
    verdicts = [error("request", one) for one in errors] or [ok("request", _told(request))]
    checks: list[Callable[[_Case], Iterator[Verdict]]] = [_container, _mpi, _first_phase]
    if request.kind == "local":
        checks += [_local_cores, _local_python]
    elif request.kind == "allocation":
        checks += [_allocation]
    else:
        checks += [_options, _dependency]
        checks += [] if site is None else [_partition, _time, _node_count, _node_size, _hosts, _requeue]
    # What is malformed was replaced by something harmless, of which there is nothing to say.
    malformed = {one.key for one in errors}
    for check in checks:
        verdicts.extend(verdict for verdict in check(case) if _SUBJECTS.get(verdict.check) not in malformed)
    placing = [] if malformed else list(_placement(case))
    return [*verdicts, *placing, *layout_verdicts(cfg, request), *storage_verdicts(cfg)]


def _told(request: Request) -> str:
    gpus = f", {plural(request.gpus_per_node, 'GPU')} a node" if request.gpus_per_node else ""
    nodes = plural(request.nodes_text, "node")
    tasks, cores = plural(request.tasks_per_node, "task"), plural(request.cpus_per_task, "core")
    return f"{nodes}, each with {tasks} of {cores}{gpus}"


def _container(case: _Case) -> Iterator[Verdict]:
    runtime = case.cfg.cluster.container.runtime
    try:
        containers.check(case.cfg)
    except UserError as found:
        yield error("container", found)
        return
    if runtime is not None:
        yield ok("container", f"{runtime}: {case.cfg.cluster.container.image}")


def _mpi(case: _Case) -> Iterator[Verdict]:
    try:
        start = plan_mpi(case.cfg, None if case.site is None else case.site.mpi_types, case.env)
    except UserError as found:
        yield error("mpi", found)
        return
    if start is None:
        return
    if start.plugin is None:
        yield ok("mpi", start.why)
        return
    problem = None if start.plugin == "none" else why_unloadable(case.client, start.plugin)
    if start.plugin == "none":
        yield warning(
            "mpi", "srun --mpi=none wires nothing up: every rank will be number 0 of 1, unless its MPI can help"
        )
    elif problem is not None:
        yield warning(
            "mpi", f"srun lists {start.plugin} and can't load it here ({problem}); nor can nodes that are alike"
        )
    else:
        yield ok("mpi", f"srun --mpi={start.plugin}: {start.why}")


def _placement(case: _Case) -> Iterator[Verdict]:
    wanted = None
    try:
        wanted = wanted_placement(case.cfg, case.request, case.env)
    except UserError as found:
        yield error("placement", found)
    yield from placement_verdicts(case.cfg, case.request, wanted, case.env)


def _local_cores(case: _Case) -> Iterator[Verdict]:
    have, want = len(os.sched_getaffinity(0)), case.request.cpus_per_node
    if want > have:
        slower = want / have
        cost = f"the ranks share cores, and a step takes about {slower:.1f} times as long"
        ranks = f"{plural(case.request.tasks_per_node, 'rank')} of {plural(case.request.cpus_per_task, 'core')}"
        told = f"{ranks} on {plural(have, 'core')}: {cost}"
        yield warning("cores", f"{told}. Fewer: cluster.tasks_per_node={max(have // case.request.cpus_per_task, 1)}")
    else:
        yield ok("cores", f"{want} of {have} cores")


def _local_python(case: _Case) -> Iterator[Verdict]:
    python = case.cfg.cluster.python
    if python is not None and shutil.which(python) is None:
        instead = "cluster.python=null for the interpreter that runs this command, or the path of another one"
        yield error("python", UserError("no such program", key="cluster.python", value=python, instead=instead))


def _allocation(case: _Case) -> Iterator[Verdict]:
    try:
        case.client.require("srun", "scontrol")
        fitted = fit(case.request, case.env)
    except UserError as found:
        yield error("allocation", found)
        return
    yield ok("allocation", f"job {case.env['SLURM_JOB_ID']}: the run takes {fitted.nodes} of its nodes")


def _options(case: _Case) -> Iterator[Verdict]:
    found = option_mistakes(case.cfg)
    told = {one.key for one in found}
    found += [one for one in unknown_options(case.cfg, case.client) if one.key not in told]
    yield from (error("options", one) for one in found)
    given = [*case.cfg.cluster.sbatch, *case.cfg.cluster.srun]
    if given and not found:
        yield ok("options", f"known to sbatch and srun here: {', '.join(map(str, given))}")


def _dependency(case: _Case) -> Iterator[Verdict]:
    try:
        text = dependency_text(case.cfg)
    except UserErrors as found:
        yield from (error("dependency", one) for one in found.errors)
    except UserError as found:
        yield error("dependency", found)
    else:
        unknown = unknown_jobs(case.cfg, case.client)
        yield from (error("dependency", one) for one in unknown)
        if text and not unknown:
            yield ok("dependency", text)


def _partition(case: _Case) -> Iterator[Verdict]:
    assert case.site is not None
    asked = case.cfg.cluster.partition
    names = [record.name for record in case.site.partitions]
    for name in unknown_partitions(case.site, asked):
        why = "the site has no such partition"
        yield error("partition", UserError(why, key="cluster.partition", value=name, instead=nearest(name, names)))
    chosen = case.site.chosen(asked)
    if asked is None and not chosen:
        instead = nearest("", names)
        yield error("partition", UserError("the site has no default", key="cluster.partition", instead=instead))
    for record in chosen:
        if record.state != "UP":
            takes = "keeps jobs waiting" if record.state == "DOWN" else "takes no jobs"
            yield warning("partition", f"{record.name} is {record.state} and {takes} until the site opens it")
        else:
            yield ok("partition", f"{record.name}{' (the default)' if asked is None else ''}")


def _time(case: _Case) -> Iterator[Verdict]:
    assert case.site is not None
    asked, lead = case.request.time_s, derive(case.site, case.cfg, case.request).lead_s
    shown = case.cfg.cluster.time
    most = max((record.max_time_s for record in case.site.chosen(case.cfg.cluster.partition)), default=math.inf)
    if asked <= lead:
        why = f"not longer than the {lead} s before its end at which the run saves (checkpoint.save_lead_s)"
        instead = f"at least {seconds_to_time(lead + 2 * EARLY_S)}, or a smaller checkpoint.save_lead_s"
        yield error("time", UserError(why, key="cluster.time", value=shown, instead=instead))
    elif asked > most and not (math.isinf(asked) and math.isinf(most)):
        where = case.cfg.cluster.partition or "the default partition"
        why = f"more than MaxTime={seconds_to_time(most)} of {where}, so that the job would never start"
        instead = f"cluster.time={seconds_to_time(most)}: the run goes on over several attempts"
        yield error("time", UserError(why, key="cluster.time", value=shown, instead=instead))
    elif asked <= lead + EARLY_S:
        told = f"Slurm may signal up to {EARLY_S} s before the {lead} s asked, which is the whole of {shown}"
        yield warning("time", f"{told}: attempts may end as soon as they have begun")
    else:
        yield ok("time", f"{seconds_to_time(asked)}, signal {lead} s before its end")


def _node_count(case: _Case) -> Iterator[Verdict]:
    assert case.site is not None
    want = case.request.nodes
    for record in case.site.chosen(case.cfg.cluster.partition):
        most = min(record.total_nodes, record.max_nodes)
        if want > most:
            limit = f"MaxNodes={record.max_nodes:g}" if record.max_nodes < record.total_nodes else "all there are"
            why = f"partition {record.name} gives at most {most:g} nodes ({limit})"
            instead = f"cluster.nodes={most:g}, or another partition"
            found = UserError(why, key="cluster.nodes", value=case.request.nodes_text, instead=instead)
            yield error("nodes", found)
        elif case.request.max_nodes < record.min_nodes:
            why = f"partition {record.name} wants at least {record.min_nodes} nodes (MinNodes)"
            instead = f"cluster.nodes={record.min_nodes}, or another partition"
            yield error("nodes", UserError(why, key="cluster.nodes", value=case.request.nodes_text, instead=instead))
        else:
            yield ok("nodes", f"{case.request.nodes_text} of {record.total_nodes} in {record.name}")


def _node_size(case: _Case) -> Iterator[Verdict]:
    assert case.site is not None
    for record in case.site.chosen(case.cfg.cluster.partition):
        yield _fits_partition(case, record)


@dataclass(frozen=True)
class _Demand:
    """Something that each node must have enough of."""

    key: str
    value: Any
    told: str
    want: float
    size: Callable[[NodeShape], float]


def _demands(case: _Case, record: PartitionRecord) -> list[_Demand]:
    request, kind = case.request, case.cfg.cluster.gpu_type
    memory = request.memory_mb or (request.memory_per_cpu_mb or 0) * request.cpus_per_node
    asked = "cluster.memory" if request.memory_mb else "cluster.memory_per_cpu"
    value = case.cfg.cluster.memory if request.memory_mb else case.cfg.cluster.memory_per_cpu
    tasks, cores = plural(request.tasks_per_node, "task"), plural(request.cpus_per_task, "core")
    need = "needs" if request.tasks_per_node == 1 else "need"
    cpus = f"{tasks} of {cores} {need} {plural(request.cpus_per_node, 'CPU')}"
    gpus = plural(request.gpus_per_node, "GPU") + (f" of type {kind}" if kind else "")

    def cpus_of(shape: NodeShape) -> float:
        return min(shape.cpus, record.max_cpus_per_node)

    return [
        _Demand("cluster.tasks_per_node", request.tasks_per_node, cpus, request.cpus_per_node, cpus_of),
        _Demand(asked, value, f"{memory} MB", memory, lambda shape: shape.memory_mb),
        _Demand(
            "cluster.gpus_per_node", request.gpus_per_node, gpus, request.gpus_per_node, lambda shape: shape.gpus(kind)
        ),
    ]


def _fits_partition(case: _Case, record: PartitionRecord) -> Verdict:
    """Whether enough nodes of a partition are large enough for the ranks of one node."""
    assert case.site is not None
    fitting, nodes = case.site.shapes_of(record.name), case.request.nodes
    demands = _demands(case, record)
    for demand in demands if fitting else []:
        have = ", ".join(f"{number:g}" for number in sorted({demand.size(shape) for shape in fitting}))
        fitting = [shape for shape in fitting if demand.size(shape) >= demand.want]
        count = sum(shape.count for shape in fitting)
        if count < min(nodes, record.total_nodes):
            enough = f"{plural(count or 'no', 'node')} of partition {record.name} can give that"
            why = f"{demand.told} on each node, and {enough} (its nodes have {have})"
            instead = "ask for less on each node, or another partition"
            return error("node size", UserError(why, key=demand.key, value=demand.value, instead=instead))
    usable = sum(shape.count for shape in fitting if shape.usable)
    if fitting and usable < nodes:
        states = ", ".join(sorted({f"{shape.count} {shape.state}" for shape in fitting}))
        return warning("node size", f"{usable} usable nodes in {record.name} now ({states}): the job will wait")
    return ok("node size", f"{demands[0].told} of a node in {record.name}")


def _hosts(case: _Case) -> Iterator[Verdict]:
    assert case.site is not None
    chosen = case.site.chosen(case.cfg.cluster.partition)
    known = {name for record in case.site.partitions for name in expand(record.nodes)}
    within = {name for record in chosen for name in expand(record.nodes)}
    for key, names in (("cluster.nodelist", case.request.nodelist), ("cluster.exclude", case.request.exclude)):
        if names and within.issuperset(names):
            yield ok("hosts", f"{key}: all in the partition ({compress(names)})")
        for name in names:
            if name not in known:
                why = "the site has no such node"
                yield error("hosts", UserError(why, key=key, value=name, instead=nearest(name, known)))
            elif name not in within and key == "cluster.nodelist":
                where = ", ".join(record.name for record in chosen)
                instead = "another node, or the partition that it belongs to"
                yield error("hosts", UserError(f"not in partition {where}", key=key, value=name, instead=instead))
    yield from (_enough_left(case, record) for record in chosen if case.request.exclude)


def _enough_left(case: _Case, record: PartitionRecord) -> Verdict:
    """Whether a partition has enough nodes besides those that are to be avoided."""
    left = set(expand(record.nodes)) - set(case.request.exclude)
    if len(left) >= case.request.nodes:
        return ok("hosts", f"{plural(len(left), 'node')} of {record.name} left without those of cluster.exclude")
    besides = plural(len(left) or "no", "node")
    why = f"partition {record.name} has {besides} besides, and the run needs {case.request.nodes}"
    value = case.cfg.cluster.exclude
    return error("hosts", UserError(why, key="cluster.exclude", value=value, instead="a shorter list, or fewer nodes"))


def _first_phase(case: _Case) -> Iterator[Verdict]:
    """Whether examining nodes, as a job or before training (`resilience.preflight`), can do anything."""
    request = case.request
    if examines(case.cfg) and request.max_nodes < 2:
        yield warning(
            "preflight", "job=preflight compares nodes, and this run has one: only what the doctor finds makes it bad"
        )
    if not case.cfg.resilience.preflight or examines(case.cfg):
        return
    if request.max_nodes < 2:
        yield warning("preflight", "resilience.preflight compares nodes, and this run has one: it is passed over")
    elif request.kind == "allocation":
        yield warning(
            "preflight", "bad nodes end the run: an allocation of salloc has no others (resilience.preflight)"
        )
    elif request.max_nodes == 2:
        factor = case.cfg.resilience.checks.two_nodes_factor
        yield ok("preflight", f"of two nodes, one is refused only if it is slower by a factor of {factor:g}")
    else:
        yield ok("preflight", "nodes are examined before training; bad ones are left out and the job is queued again")


def _requeue(case: _Case) -> Iterator[Verdict]:
    decisions = derive(case.site, case.cfg, case.request)
    yield ok("requeue", f"{decisions.requeue}: {decisions.reasons['requeue']}")
    yield ok("preemption", decisions.preemption)
