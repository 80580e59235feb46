"""What the configuration asks of the machine, read once into numbers, with every malformed value refused at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dthpc.errors import UserError, raise_together
from dthpc.launch.exclusion import excluded_nodes
from dthpc.slurm.hostlist import expand
from dthpc.slurm.units import sbatch_memory_to_mb, sbatch_time_to_seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Nodes, tasks, cores, GPUs and time of one attempt."""

    kind: str
    """`local`, `slurm` or `allocation`."""

    nodes: int
    """Fewest nodes."""

    max_nodes: int
    """Most nodes."""

    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    """GPUs of each node, whether they are asked by node or by task."""

    gpus_per_task: int | None
    time_s: float
    """Time limit, rounded up to minutes as Slurm does; infinite where there is none, and for local runs."""

    memory_mb: int | None
    """Memory of each node; `None`: the site's default."""

    memory_per_cpu_mb: int | None
    nodelist: list[str]
    exclude: list[str]

    @property
    def ranks(self) -> int:
        """Ranks on the fewest nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_node(self) -> int:
        """Cores that the ranks of one node need."""
        return self.tasks_per_node * self.cpus_per_task

    @property
    def nodes_text(self) -> str:
        """The number of nodes as sbatch reads it."""
        return str(self.nodes) if self.nodes == self.max_nodes else f"{self.nodes}-{self.max_nodes}"


def read_request(cfg: Any) -> Request:
    """The request in `cfg.cluster`.

    Raises:
        UserError: one or several values are malformed; all of them are told.
    """
    request, errors = try_request(cfg)
    raise_together(errors)
    return request


def try_request(cfg: Any) -> tuple[Request, list[UserError]]:
    """The request, with harmless values in the place of malformed ones, and the errors of these."""
    cluster = cfg.cluster
    errors: list[UserError] = []

    def read(parse: Callable[[], T], otherwise: T) -> T:
        try:
            return parse()
        except UserError as error:
            errors.append(error)
            return otherwise

    nodes, max_nodes = read(lambda: parse_nodes(cluster.nodes), (1, 1))
    tasks = int(cluster.tasks_per_node)
    per_task = cluster.gpus_per_task
    slurm = cluster.kind == "slurm"
    seconds = read(lambda: sbatch_time_to_seconds(str(cluster.time)), math.inf) if slurm else math.inf
    request = Request(
        kind=cluster.kind,
        nodes=nodes,
        max_nodes=max_nodes,
        tasks_per_node=tasks,
        cpus_per_task=int(cluster.cpus_per_task),
        gpus_per_node=int(cluster.gpus_per_node) or (int(per_task) * tasks if per_task else 0),
        gpus_per_task=None if per_task is None else int(per_task),
        time_s=seconds if math.isinf(seconds) else 60.0 * math.ceil(seconds / 60),
        memory_mb=read(lambda: _memory(cluster, "memory"), None),
        memory_per_cpu_mb=read(lambda: _memory(cluster, "memory_per_cpu"), None),
        nodelist=read(lambda: _hosts(cluster, "nodelist"), []),
        exclude=read(lambda: excluded_nodes(cfg), []),
    )
    errors.extend(_contradictions(request))
    return request, errors


def parse_nodes(value: Any) -> tuple[int, int]:
    """Fewest and most nodes of `cluster.nodes`: a number, or a range such as `2-4`.

    Raises:
        UserError: it is neither, nought, or runs backwards.
    """
    match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", str(value), re.ASCII)
    if match is None or isinstance(value, bool):
        why = "is neither a number of nodes nor a range of them"
        raise UserError(why, key="cluster.nodes", value=value, instead="cluster.nodes=2, or cluster.nodes=2-4")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1:
        raise UserError("a run needs a node", key="cluster.nodes", value=value, instead="cluster.nodes=1")
    if low > high:
        instead = f"cluster.nodes={high}-{low}"
        raise UserError("the range runs backwards", key="cluster.nodes", value=value, instead=instead)
    return low, high


def _memory(cluster: Any, name: str) -> int | None:
    value = getattr(cluster, name)
    return None if value is None else sbatch_memory_to_mb(str(value), f"cluster.{name}")


def _hosts(cluster: Any, name: str) -> list[str]:
    value = getattr(cluster, name)
    if value is None:
        return []
    try:
        names = expand(str(value))
    except UserError as error:
        raise UserError(error.why, key=f"cluster.{name}", value=value, instead=error.instead) from error
    if not names:
        raise UserError("names no host", key=f"cluster.{name}", value=repr(value), instead="leave it out")
    return names


def _contradictions(request: Request) -> list[UserError]:
    errors = []
    if request.memory_mb is not None and request.memory_per_cpu_mb is not None:
        why = "cluster.memory is set too, and Slurm takes only one of the two"
        errors.append(UserError(why, key="cluster.memory_per_cpu", instead="set one of them to null"))
    both = sorted(set(request.nodelist) & set(request.exclude))
    if both:
        why = f"{', '.join(both[:5])} is both asked for in cluster.nodelist and avoided here"
        errors.append(UserError(why, key="cluster.exclude", instead="take it out of one of the two"))
    if len(set(request.nodelist)) > request.max_nodes:
        why = f"{len(set(request.nodelist))} nodes must be part of a job that gets at most {request.max_nodes}"
        instead = f"cluster.nodes={len(set(request.nodelist))}, or a shorter list"
        errors.append(UserError(why, key="cluster.nodelist", instead=instead))
    if request.kind == "local" and request.max_nodes > 1:
        why = "a local run has one node: this machine"
        errors.append(UserError(why, key="cluster.nodes", value=request.nodes_text, instead="add +cluster=slurm"))
    return errors
