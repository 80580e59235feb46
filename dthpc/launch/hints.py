"""Values that were typed and change nothing: said once at the submission, and never an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dthpc.config.schema import Config
from dthpc.jobs.collectives.settings import TARGET as COLLECTIVES
from dthpc.jobs.preflight.options import TARGET as PREFLIGHT
from dthpc.launch.request import Request
from dthpc.launch.verdicts import Verdict, plural, warning

Unused = Iterator[tuple[tuple[str, ...], str]]
"""Keys, or the beginnings of keys, and why they have no effect."""

_OF_A_TRAINING = ("train", "model", "data", "loss", "optim", "precision", "checkpoint", "callbacks")
_OF_SBATCH = (
    *("cluster.partition", "cluster.account", "cluster.qos", "cluster.constraint", "cluster.reservation"),
    *("cluster.time", "cluster.memory", "cluster.memory_per_cpu", "cluster.mail_user", "cluster.mail_type"),
    *("cluster.comment", "cluster.after", "cluster.dependency", "cluster.sbatch", "cluster.array_parallelism"),
)
_OF_SLURM = (
    *("cluster.nodelist", "cluster.exclude", "cluster.exclusive", "cluster.gpu_type", "cluster.setup"),
    *("cluster.srun", "comm.mpi_plugin", "checkpoint.save_lead_s"),
)


def hints(config: Any, request: Request, typed: Collection[str]) -> list[Verdict]:
    """What was typed and has no effect, one verdict for each reason.

    Args:
        config: the configuration, which has no mistakes.
        request: what it asks of the machine.
        typed: keys of the command line. What a preset says, or the schema, is nobody's wish.
    """
    found = []
    for keys, why in _unused(config, request) if typed else ():
        named = [key for key in sorted(typed) if key.startswith(tuple(f"{each}." for each in keys)) or key in keys]
        told = [text for key in named if (text := _told(config, key)) is not None]
        if told:
            verb = "has" if len(told) == 1 else "have"
            found.append(warning("no effect", f"{', '.join(told)} {verb} no effect because {why}"))
    return found


def _told(config: Any, key: str) -> str | None:
    """`key=value`; None where the value is what it would be anyway."""
    value, default = _at(config, key), _at(Config(), key)
    if not isinstance(value, (str, int, float)):
        return key if value else None
    return None if value == default else f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _at(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if hasattr(node, "get") else getattr(node, part, None)
    return node


def _unused(config: Any, request: Request) -> Unused:
    target = config.job.get("_target_")
    yield from _place(config, request)
    if target in (COLLECTIVES, PREFLIGHT):
        name = "collectives" if target == COLLECTIVES else "preflight"
        others = (
            *_OF_A_TRAINING,
            "comm.hierarchical",
            "resilience.preflight",
            "resilience.checks",
            *(("parallel",) if target == PREFLIGHT else ()),
        )
        yield others, f"job={name} trains nothing"
        return
    if not config.resilience.preflight:
        yield ("resilience.checks",), "resilience.preflight=false: nodes are not examined before training"
    yield from _layout(config, request)
    yield from _training(config)


def _place(config: Any, request: Request) -> Unused:
    kind = config.cluster.kind
    if kind == "local":
        if config.comm.backend == "gloo":
            yield ("comm.tune",), "comm.backend=gloo starts ranks without MPI, and leaves Gloo alone to measure"
        yield (*_OF_SBATCH, *_OF_SLURM), "ranks run on this machine, without Slurm (+cluster=slurm submits a job)"
    elif kind == "allocation":
        yield _OF_SBATCH, "ranks run in the allocation at hand (cluster.kind=allocation), and nothing is submitted"
    if kind == "slurm":
        yield ("resilience.requeue_delay_s",), "Slurm decides when a job starts again"
    if request.max_nodes * request.tasks_per_node == 1:
        yield ("comm.backend", "comm.axes", "comm.tune", "comm.shared_memory", "comm.hierarchical"), "there is one rank"


def _layout(config: Any, request: Request) -> Unused:
    parallel = config.parallel
    degrees = {axis: int(parallel[axis]) for axis in ("pp", "cp", "tp")}
    ranks = request.max_nodes * request.tasks_per_node // (degrees["pp"] * degrees["cp"] * degrees["tp"])
    for axis, degree in degrees.items():
        if degree == 1:
            yield (f"comm.axes.{axis}",), f"parallel.{axis}=1: nobody talks along that axis"
    if parallel.pp == 1:
        yield ("parallel.schedule", "parallel.chunks", "parallel.stages"), "parallel.pp=1: there is no pipeline"
    if parallel.tp == 1:
        yield ("parallel.sequence_parallel",), "parallel.tp=1: no layers are split"
    if ranks == 1:
        alone = ("parallel.zero", "parallel.bucket_mb", "parallel.gradients", "comm.axes.replicate", "comm.axes.shard")
        yield (*alone, "comm.hierarchical"), "there is one data-parallel rank, with nobody to share or sum with"
    elif request.max_nodes == 1:
        yield ("comm.hierarchical",), f"all {plural(request.tasks_per_node, 'rank')} are on one node"
    elif parallel.zero and parallel.replicate in (None, 1):
        yield ("comm.hierarchical",), f"parallel.zero={parallel.zero} makes one replica of all ranks"
    if parallel.outer.every == 0:
        lone = ("parallel.outer.lr", "parallel.outer.momentum", "parallel.outer.delay")
        yield lone, "parallel.outer.every=0: gradients are reduced in every step"
    if "nvme" not in (parallel.offload.optimizer, parallel.offload.parameters):
        yield ("parallel.offload.folder",), "neither parallel.offload.optimizer nor .parameters is nvme"
    if parallel.activations.mode == "none":
        yield ("parallel.activations.every",), "parallel.activations.mode=none: all activations are kept"


def _training(config: Any) -> Unused:
    precision, schedule = config.precision, config.optim.schedule.name
    if precision.compute != "fp16":
        scaling = ("precision.loss_scale", "precision.loss_scale_growth_every")
        yield scaling, f"precision.compute={precision.compute} needs no loss scale"
    if precision.compute == "fp32":
        yield ("precision.parameters",), "precision.compute=fp32: all is held in fp32"
    if schedule == "constant":
        yield ("optim.schedule.min_ratio",), "optim.schedule.name=constant does not decay"
    if schedule != "wsd":
        yield ("optim.schedule.decay_fraction",), f"optim.schedule.name={schedule}: wsd alone has a decay of its own"
    if config.train.eval_every < 1:
        yield (
            ("train.eval_samples",),
            f"train.eval_every={config.train.eval_every}: nothing is evaluated during training",
        )
    if config.checkpoint.keep == 0:
        yield ("checkpoint.keep_every",), "checkpoint.keep=0: all checkpoints are kept"
