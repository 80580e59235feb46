"""Mistakes in `config.parallel`, against the ranks and everything the degrees must divide; free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from dthpc.config.parallel import ActivationConfig, GradientConfig, OffloadConfig, OuterConfig, ParallelConfig
from dthpc.errors import UserError, nearest
from dthpc.parallel.combinations import find_conflicts, value_at
from dthpc.parallel.fit import check_model
from dthpc.parallel.pipeline.names import SCHEDULES, chunks_of, mistakes

NESTED = {
    "gradients": GradientConfig,
    "activations": ActivationConfig,
    "offload": OffloadConfig,
    "outer": OuterConfig,
}

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""All axes, from the outermost to the innermost by default."""

WORDS = {
    "schedule": SCHEDULES,
    "gradients.dtype": ("fp32", "bf16"),
    "activations.mode": ("none", "full", "selective"),
    "offload.optimizer": (None, "cpu", "nvme"),
    "offload.parameters": (None, "cpu", "nvme"),
}
# Smallest value of each number; None in the configuration means that it is not set.
SMALLEST = {
    **dict.fromkeys(("dp", "replicate", "tp", "pp", "cp", "ep", "chunks", "bucket_mb", "activations.every"), 1),
    **dict.fromkeys(("zero", "gradients.powersgd_rank", "outer.every", "outer.delay"), 0),
}
NODES = "nodes"
"""Word for `parallel.replicate`: as many replicas as leave the shards of each inside a node."""

STAGE_WORDS = ("auto", "measured", "uniform")
MOST_SIZES = 4096
"""Numbers of nodes of a range that are checked one by one."""


def parallel_of(config: Any) -> ParallelConfig:
    """`config.parallel` as a typed object, with the schema's default for what it leaves out."""
    node = config.parallel
    # Merging with the schema in OmegaConf takes 10 ms, which a dry run would notice.
    given: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    for name, kind in {"": ParallelConfig, **NESTED}.items():
        group, known = (given.get(name) or {}) if name else given, vars(kind())
        for key in sorted(group.keys() - known.keys()):
            told = ".".join(filter(None, ("parallel", name, key)))
            raise UserError("there is no such key", key=told, value=group[key], instead=nearest(key, known))
    return ParallelConfig(**{**given, **{name: kind(**given.get(name) or {}) for name, kind in NESTED.items()}})


def degrees_of(config: Any, world_size: int) -> dict[str, int]:
    """The degree of each axis on that many ranks, for degrees that `check` has let pass."""
    parallel = parallel_of(config)
    dp = world_size // (parallel.pp * parallel.cp * parallel.tp)
    replicate = _replicas(parallel, config, world_size)
    fixed = {axis: int(getattr(parallel, axis)) for axis in ("pp", "cp", "tp")}
    return {**fixed, "replicate": replicate, "shard": dp // replicate}


def _replicas(parallel: ParallelConfig, config: Any, ranks: int) -> int:
    dp = ranks // (parallel.pp * parallel.cp * parallel.tp)
    if parallel.zero == 0:
        return dp
    if parallel.replicate == NODES:
        tasks = value_at(config, "cluster.tasks_per_node") or ranks
        return dp // math.gcd(dp, tasks // parallel.tp if tasks % parallel.tp == 0 else 1)
    return int(parallel.replicate or 1)


def micro_batches_of(config: Any, dp: int, pp: int) -> int:
    """Micro-batches that each rank runs in a step.

    A rank's share of the global batch is ⌈global_batch/dp⌉ samples, the same number for all so that all run equally
    many micro-batches; the last ones of a rank may be smaller, or empty. Where `train.micro_batch` is null, there is
    one micro-batch without a pipeline. With one there are as many as are needed to cut the share into at most 4·pp
    equal parts (the bubble is then at most (pp-1)/4pp of the work), for `interleaved` rounded up to a multiple of pp.

    Args:
        config: the whole configuration.
        dp: data-parallel degree.
        pp: pipeline degree.

    Returns:
        The number m of micro-batches, of ⌈share/m⌉ samples each.
    """
    share, micro = -(-int(config.train.global_batch) // dp), value_at(config, "train.micro_batch")
    if micro is not None:
        return -(-share // int(micro))
    if pp == 1:
        return 1
    size = -(-share // min(share, 4 * pp))
    count = -(-share // size)
    interleaved = value_at(config, "parallel.schedule") == "interleaved" and count >= pp
    return -(-count // pp) * pp if interleaved else count


def check(config: Any, world_size: int | None = None) -> list[UserError]:
    """Mistakes in `config.parallel`: of its values, with each other, with the model, and on that many ranks.

    Args:
        config: the whole configuration; groups that it lacks are not looked into.
        world_size: ranks in all; None: every number of ranks that `config.cluster` may start.

    Returns:
        All that are independent of each other. Of several possible numbers of ranks, those of the first that has any.
    """
    parallel = parallel_of(config)
    errors = [*_words(parallel), *_ranges(parallel), *_axes(parallel)]
    if errors:
        return errors
    errors = [*find_conflicts(parallel, config), *_stages(parallel, config), *check_model(parallel, config)]
    for size in _possible_sizes(config.cluster) if world_size is None else [world_size]:
        found = _check_degrees(parallel, size) or [
            *_check_batch(parallel, config, size),
            *_check_outer(parallel, config, size),
        ]
        if found:
            return errors + found
    return errors


def _words(parallel: ParallelConfig) -> Iterator[UserError]:
    for key, valid in WORDS.items():
        value = _value(parallel, key)
        if value not in valid:
            words = [str(word) for word in valid if word is not None]
            hint = nearest(str(value), words)
            yield UserError("no such choice", key=f"parallel.{key}", value=value, instead=hint)
    if not isinstance(parallel.stages, list) and parallel.stages not in STAGE_WORDS:
        instead = f"{nearest(str(parallel.stages), STAGE_WORDS)}, or a list with the number of layers of each stage"
        yield UserError("no such choice", key="parallel.stages", value=parallel.stages, instead=instead)


def _ranges(parallel: ParallelConfig) -> Iterator[UserError]:
    for key, smallest in SMALLEST.items():
        value = _value(parallel, key)
        if isinstance(value, int) and value < smallest:
            yield UserError("too small", key=f"parallel.{key}", value=value, instead=f"give at least {smallest}")
    replicate = parallel.replicate
    if replicate not in (None, NODES) and (not isinstance(replicate, int) or isinstance(replicate, bool)):
        instead = f"a number of replicas, {NODES} (shards stay inside a node), or null"
        yield UserError(
            "neither a number nor a word it knows", key="parallel.replicate", value=replicate, instead=instead
        )
    if parallel.zero > 3:
        instead = "0 (nothing sharded), 1 (optimizer state), 2 (gradients too) or 3 (parameters too)"
        yield UserError("there is no such ZeRO stage", key="parallel.zero", value=parallel.zero, instead=instead)


def _axes(parallel: ParallelConfig) -> Iterator[UserError]:
    for axis, words in (("cp", "context"), ("ep", "expert")):
        degree = getattr(parallel, axis)
        if degree > 1:
            yield UserError(
                f"{words} parallelism is not available in this version",
                key=f"parallel.{axis}",
                value=degree,
                instead=f"parallel.{axis}=1"
                + (", and parallel.sequence_parallel=true to split the sequence over tp" if axis == "cp" else ""),
            )
    if sorted(parallel.order) != sorted(AXES):
        missing = [axis for axis in AXES if axis not in parallel.order]
        wrong = [axis for axis in parallel.order if axis not in AXES or parallel.order.count(axis) > 1]
        told = [f"{', '.join(missing)} left out"] if missing else []
        told += [f"{', '.join(dict.fromkeys(wrong))} unknown or twice"] if wrong else []
        yield UserError(
            f"names each of the {len(AXES)} axes once, from the outermost to the innermost ({'; '.join(told)})",
            key="parallel.order",
            value=f"[{','.join(parallel.order)}]",
            instead=f"'parallel.order=[{','.join(AXES)}]', in the order of your choice",
        )


def _stages(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    """Chunks and layers of a pipeline, as far as the schedule and the list say."""
    if parallel.pp == 1:
        return
    chunks = chunks_of(parallel.schedule, parallel.chunks)
    # As many micro-batches as suit every schedule: their number is looked at with the batch.
    yield from mistakes(parallel.schedule, parallel.pp, chunks, parallel.pp)
    if parallel.schedule == "interleaved" and chunks < 2:
        instead = "parallel.chunks=2, or parallel.schedule=1f1b"
        yield UserError("interleaved needs at least 2", key="parallel.chunks", value=chunks, instead=instead)
    if isinstance(parallel.stages, list):
        yield from _stage_list(parallel.stages, parallel.pp, chunks)


def _stage_list(stages: list[Any], pp: int, chunks: int) -> Iterator[UserError]:
    shown, count = f"[{','.join(map(str, stages))}]", pp * chunks
    if len(stages) != count:
        yield UserError(
            f"has {len(stages)} numbers, but the pipeline has {count} stages (pp={pp}, chunks={chunks})",
            key="parallel.stages",
            value=shown,
            instead=f"one number of layers for each of the {count} stages, or auto",
        )
    for position, layers in enumerate(stages):
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            yield UserError(
                f"stage {position} has {layers} layers, and a stage without layers has nothing to compute (what runs "
                "before and after all layers belongs to the first and the last one)",
                key="parallel.stages",
                value=shown,
                instead="whole numbers of at least 1",
            )


def _possible_sizes(cluster: Any) -> list[int]:
    """Numbers of ranks, smallest first; empty where the numbers make no sense, which is told elsewhere."""
    try:
        ends = [int(end) for end in str(cluster.nodes).split("-", 1)]
    except ValueError:
        return []
    low, high, tasks = min(ends), max(ends), int(cluster.tasks_per_node)
    if low < 1 or tasks < 1:
        return []
    nodes = [*range(low, min(high, low + MOST_SIZES)), high]
    return [count * tasks for count in dict.fromkeys(nodes)]


def _check_degrees(parallel: ParallelConfig, ranks: int) -> list[UserError]:
    degrees = {axis: getattr(parallel, axis) for axis in ("dp", "pp", "tp")}
    asked = {axis: degree for axis, degree in degrees.items() if degree is not None and (degree > 1 or axis == "dp")}
    product = math.prod(asked.values())
    told = " · ".join(f"{axis}={degree}" for axis, degree in asked.items())
    if parallel.dp is not None and product != ranks:
        others = product // parallel.dp
        fits = f"parallel.dp=null or parallel.dp={ranks // others}, or " if ranks % others == 0 else ""
        return [
            UserError(
                f"the degrees multiply to {product} ({told}), but there are {ranks} ranks",
                key="parallel.dp",
                value=parallel.dp,
                instead=f"{fits}as many ranks as the degrees ask (cluster.nodes · cluster.tasks_per_node = {product})",
            )
        ]
    if ranks % product:
        axis = "tp" if parallel.tp > 1 else "pp"
        rest = product // degrees[axis]
        fitting = max((d for d in _divisors(ranks) if d <= degrees[axis] and ranks % (d * rest) == 0), default=None)
        smaller = f"parallel.{axis}={fitting}, or " if fitting else ""
        more = -(-ranks // product) * product
        return [
            UserError(
                f"the degrees multiply to {product} ({told}), which does not divide the {ranks} ranks "
                f"(remainder {ranks % product})",
                key=f"parallel.{axis}",
                value=degrees[axis],
                instead=f"{smaller}a multiple of {product} ranks (cluster.nodes · cluster.tasks_per_node = {more})",
            )
        ]
    return _check_replicas(parallel, ranks // (parallel.pp * parallel.tp))


def _check_replicas(parallel: ParallelConfig, dp: int) -> list[UserError]:
    replicate = parallel.replicate
    if replicate is None or (parallel.zero == 0 and replicate == dp) or (parallel.zero > 0 and replicate == NODES):
        return []
    if parallel.zero == 0:
        why = f"without ZeRO every one of the {dp} data-parallel ranks is a replica (parallel.zero=0)"
        instead = "parallel.replicate=null, or parallel.zero=3 for hybrid sharding"
    elif dp % replicate:
        why = f"the {dp} data-parallel ranks do not divide into {replicate} replicas (remainder {dp % replicate})"
        fitting = max(count for count in _divisors(dp) if count <= replicate)
        instead = f"parallel.replicate={fitting}, or null"
    else:
        return []
    return [UserError(why, key="parallel.replicate", value=replicate, instead=instead)]


def _check_batch(parallel: ParallelConfig, config: Any, ranks: int) -> list[UserError]:
    whole, micro = int(config.train.global_batch), value_at(config, "train.micro_batch")
    if whole < 1 or (micro is not None and not 1 <= micro <= whole):
        return []  # Told by the checks of each value's own range.
    dp = ranks // (parallel.pp * parallel.tp)
    if whole < dp:
        return [
            UserError(
                f"a global batch of {whole} samples leaves {dp - whole} of the {dp} data-parallel ranks without work "
                "in every step",
                key="train.global_batch",
                value=whole,
                instead=f"train.global_batch={dp} or more, or fewer ranks",
            )
        ]
    share = -(-whole // dp)
    if micro is not None and micro > share:
        return [
            UserError(
                f"a rank's share is {share} samples (train.global_batch={whole} over {dp} data-parallel ranks), fewer "
                "than one micro-batch",
                key="train.micro_batch",
                value=micro,
                instead=f"train.micro_batch=null, or at most {share}",
            )
        ]
    return _check_micro_batches(parallel, micro_batches_of(config, dp, parallel.pp), whole, micro, dp)


def _check_micro_batches(
    parallel: ParallelConfig, count: int, whole: int, micro: int | None, dp: int
) -> list[UserError]:
    pp, schedule, share = parallel.pp, parallel.schedule, -(-whole // dp)
    size = micro or -(-share // count)
    shown = f"{count} micro-batch{'' if count == 1 else 'es'}"
    told = f"a rank's share of {share} samples makes {shown} of up to {size} in a step"
    if pp == 1 or (schedule == "gpipe" and count == 1):
        return []
    if count < pp:
        fitting = (share - 1) // (pp - 1)
        enough = f"train.micro_batch={fitting} or less" if fitting else f"train.global_batch={pp * dp} or more"
        layerwise = f"parallel.schedule=gpipe with train.micro_batch={share} (layer by layer, one stage at a time)"
        return [
            UserError(
                f"too few micro-batches: {told}, and {schedule} needs at least pp={pp} to keep all stages at work",
                key="train.micro_batch" if micro is not None else "train.global_batch",
                value=micro if micro is not None else whole,
                instead=f"{enough}, or a smaller parallel.pp, or {layerwise}",
            )
        ]
    if schedule == "interleaved" and count % pp:
        fitting = next((other for other in range(size, 0, -1) if -(-share // other) % pp == 0), 0)
        smaller = f"train.micro_batch={fitting}, or " if fitting else ""
        return [
            UserError(
                f"{told}, and interleaved takes them in rounds of pp={pp} (remainder {count % pp})",
                key="train.micro_batch",
                value=micro,
                instead=f"{smaller}train.micro_batch=null, which makes full rounds, or parallel.schedule=1f1b",
            )
        ]
    return []


def _check_outer(parallel: ParallelConfig, config: Any, ranks: int) -> list[UserError]:
    if parallel.outer.every == 0 or _replicas(parallel, config, ranks) > 1:
        return []
    more = "parallel.replicate=2 or more" if parallel.zero else "more data-parallel ranks"
    return [
        UserError(
            "outer steps are taken between replicas, and this layout has only one "
            f"(parallel.zero={parallel.zero}, dp={ranks // (parallel.pp * parallel.tp)})",
            key="parallel.outer.every",
            value=parallel.outer.every,
            instead=f"parallel.outer.every=0, or {more}",
        )
    ]


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _value(parallel: ParallelConfig, key: str) -> Any:
    value: Any = parallel
    for part in key.split("."):
        value = getattr(value, part)
    return value
