"""Mistakes that no single field shows: found before anything is launched, and reported all together."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dthpc.comm import check as comm
from dthpc.config.schema import Config
from dthpc.errors import UserError, nearest
from dthpc.jobs.preflight import options as preflight
from dthpc.jobs.preflight.options import examines
from dthpc.launch.mpi import mistakes as mpi_mistakes
from dthpc.launch.request import Request, try_request
from dthpc.launch.verdicts import Verdict, ok, plural, warning

# What a room checks of its own group of the configuration (`_room_checks`) is not repeated in these tables.
WORDS = {
    "run.on_change": ("refuse", "accept"),
    "optim.schedule.name": ("constant", "cosine", "linear", "wsd"),
    "comm.shared_memory": ("auto", True, False),
    "comm.hierarchical": ("auto", True, False),
    "cluster.kind": ("local", "slurm", "allocation"),
    "cluster.requeue": ("auto", "requeue", "resubmit", "never"),
    "cluster.container.runtime": (None, "apptainer", "pyxis"),
}
# Smallest value of each number; None in the configuration means that it is not set.
SMALLEST = {
    "run.seed": 0,
    "optim.weight_decay": 0,
    "train.steps": 1,
    "train.seq_len": 1,
    "train.global_batch": 1,
    "train.micro_batch": 1,
    "train.eval_every": -1,
    "train.eval_samples": 1,
    "optim.schedule.warmup_steps": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.save_lead_s": 1,
    "comm.timeout_s": 1,
    "comm.silence_s": 0,
    "comm.flight_record": 0,
    "comm.rendezvous_timeout_s": 1,
    "placement.threads_per_rank": 1,
    "resilience.max_attempts_without_progress": 1,
    "resilience.max_attempts": 1,
    "resilience.requeue_delay_s": 0,
    "monitor.log_every": 1,
    "cluster.tasks_per_node": 1,
    "cluster.cpus_per_task": 1,
    "cluster.gpus_per_node": 0,
    "cluster.gpus_per_task": 1,
    "cluster.array_parallelism": 1,
}
TEXT_TARGET = "dthpc.data.text.TextData"
TRAIN_TARGET = "dthpc.jobs.train.run"
# Largest value of those that something else has to hold.
LARGEST = {
    "run.seed": 2**63 - 1,
    "train.steps": 10**12,
    "train.global_batch": 10**9,
    "train.seq_len": 10**9,
    "comm.timeout_s": 10**7,
    "comm.silence_s": 10**7,
    "comm.rendezvous_timeout_s": 10**7,
    "comm.flight_record": 10**6,
}


def find_mistakes(config: Any) -> list[UserError]:
    """Every mistake in a composed configuration, whatever machine it will run on.

    Args:
        config: the composed and resolved configuration.

    Returns:
        One error for each mistake; empty when there is none.
    """
    errors = _missing(config)
    if errors:
        return errors
    for check in (_top_level, _words, _ranges, _names, _optimizer, _batch, comm.check, mpi_mistakes, _targets):
        errors.extend(check(config))
    for check_room in _room_checks(config):
        errors.extend(check_room(config))
    return errors if errors else _levels(config)


def layout_verdicts(config: Any, request: Request) -> list[Verdict]:
    """What the ranks of the fewest nodes do, and whether tensor parallelism stays inside a node, as it should.

    Args:
        config: the configuration.
        request: what it asks of the machine.

    Returns:
        One verdict; none where values are missing or the layout has mistakes, which `find_mistakes` tells.
    """
    from dthpc.jobs.collectives.groups import layout_of
    from dthpc.jobs.collectives.settings import measures
    from dthpc.parallel.layout import Layout

    if _missing(config) or examines(config):
        return []
    try:
        layout = layout_of(config, request.ranks) if measures(config) else Layout.resolve(config, request.ranks)
    except UserError:
        return []
    tasks, stride = request.tasks_per_node, layout.stride("tp")
    if layout.is_inside_nodes("tp", tasks):
        return [ok("layout", layout.describe())]
    inside = [degree for degree in range(1, layout.tp) if layout.tp % degree == 0 and tasks % (degree * stride) == 0]
    instead = f"parallel.tp={max(inside)}" if inside else "tp last in parallel.order"
    told = f"{layout.describe()}: tensor parallelism, which talks several times in every layer, crosses nodes"
    return [warning("layout", f"{told} of {plural(tasks, 'rank')}. Inside a node: {instead}")]


def _room_checks(config: Any) -> list[Callable[[Any], list[UserError]]]:
    # Each room knows what its own part allows; these modules are free of torch.
    if examines(config):
        return [preflight.check]
    from dthpc.jobs.collectives import settings as collectives

    if collectives.measures(config):
        return [collectives.check]
    from dthpc.models import check as models
    from dthpc.parallel import check as parallel
    from dthpc.parallel import precision
    from dthpc.train import schedule

    return [models.check, parallel.check, precision.check, schedule.check, preflight.check, _text_source, _digits]


def _levels(config: Any) -> list[UserError]:
    """Whether replicas can sum in their nodes first, where they must (`comm.hierarchical=true`).

    Ranks fill node after node unless `cluster.srun.distribution` says otherwise: then only the ranks know.
    """
    if config.comm.hierarchical is not True or config.job.get("_target_") != TRAIN_TARGET:
        return []
    from dthpc.comm.spread import refusal, split_by_node, why_one_level
    from dthpc.parallel.layout import Layout

    request, errors = try_request(config)
    if errors:
        return []
    for nodes in dict.fromkeys((request.nodes, request.max_nodes)):
        layout = Layout.resolve(config, nodes * request.tasks_per_node)
        if layout.replicate == 1 or ("distribution" in config.cluster.srun and nodes > 1):
            continue
        for first in range(layout.world_size):
            if layout.index(first, "replicate"):
                continue  # a group is looked at once, by its first rank
            hosts = [str(rank // request.tasks_per_node) for rank in layout.ranks_along(first, "replicate")]
            if split_by_node(hosts) is None:
                return [refusal(why_one_level(hosts))]
    return []


def _top_level(config: Any) -> Iterator[UserError]:
    """Keys that the schema does not have: Hydra lets them in where they are forced by a plus."""
    schema = Config()
    known = [item.name for item in fields(Config)]
    for key in config:
        if key not in known:
            yield UserError(
                "there is no such group or key", key=str(key), value=_shown(config[key]), instead=nearest(key, known)
            )
        elif is_dataclass(getattr(schema, key)) and key != "parallel":  # which its own check looks through
            yield from _unknown_keys(config[key], getattr(schema, key), key)


def _unknown_keys(node: Any, schema: Any, prefix: str) -> Iterator[UserError]:
    known = [item.name for item in fields(schema)]
    for key in node if hasattr(node, "keys") else ():
        if key not in known:
            told = f"{prefix}.{key}"
            yield UserError("there is no such key", key=told, value=_shown(node[key]), instead=nearest(key, known))
        elif is_dataclass(getattr(schema, key)):
            yield from _unknown_keys(node[key], getattr(schema, key), f"{prefix}.{key}")


def _words(config: Any) -> Iterator[UserError]:
    for key, valid in WORDS.items():
        value = _get(config, key)
        if value not in valid:
            words = [str(word).lower() for word in valid if word is not None]  # `true`, as one writes it
            yield UserError("no such choice", key=key, value=value, instead=nearest(str(value), words))


def _ranges(config: Any) -> Iterator[UserError]:
    for key, smallest in SMALLEST.items():
        value = _get(config, key)
        if value is not None and not value >= smallest:  # nan is not, either
            yield UserError("too small", key=key, value=value, instead=f"give at least {smallest}")
    for key, largest in LARGEST.items():
        value = _get(config, key)
        if value is not None and value > largest:
            yield UserError("too large", key=key, value=value, instead=f"give at most {largest}")


def _names(config: Any) -> Iterator[UserError]:
    name = config.run.name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", name):
        safe = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:128] or "run-1"
        yield UserError(
            "a name becomes a folder: letters, digits and . _ + - only, at most 128, first a letter or digit",
            key="run.name",
            value=name,
            instead=f"run.name={safe}",
        )


def _optimizer(config: Any) -> Iterator[UserError]:
    if not 0 < config.optim.lr < math.inf:
        yield UserError(
            "a learning rate is positive and finite", key="optim.lr", value=config.optim.lr, instead="optim.lr=1e-3"
        )
    warmup, steps = config.optim.schedule.warmup_steps, config.train.steps
    if warmup is not None and warmup > steps >= 1:
        yield UserError(
            f"the warm-up is longer than the whole run of train.steps={steps}",
            key="optim.schedule.warmup_steps",
            value=warmup,
            instead="optim.schedule.warmup_steps=null, or more steps",
        )
    clip = config.train.grad_clip
    if clip is not None and not clip > 0:
        yield UserError(
            "a gradient norm to clip to is positive", key="train.grad_clip", value=clip, instead="1.0, or null"
        )
    for key in ("optim.schedule.min_ratio", "optim.schedule.decay_fraction"):
        if not 0 <= _get(config, key) <= 1:
            yield UserError("a share lies between 0 and 1", key=key, value=_get(config, key), instead="0.1")


def _batch(config: Any) -> Iterator[UserError]:
    micro, whole = config.train.micro_batch, config.train.global_batch
    if micro is not None and micro > whole:
        yield UserError(
            f"larger than the whole step of train.global_batch={whole} samples",
            key="train.micro_batch",
            value=micro,
            instead=f"at most {whole}, or null",
        )


def _targets(config: Any) -> Iterator[UserError]:
    nodes = {name: config.get(name) for name in ("job", "model", "loss", "data", "optim")}
    nodes.update({f"callbacks.{name}": node for name, node in (config.get("callbacks") or {}).items()})
    for key, node in nodes.items():
        target = node.get("_target_") if hasattr(node, "get") else None
        if not isinstance(target, str) or "." not in target:
            yield UserError(
                "names no class or function to call",
                key=f"{key}._target_",
                value=target,
                instead="package.module.Name",
            )
        # Inside a container, the class may exist there and not here.
        elif config.cluster.container.runtime is None and not _exists(target):
            yield UserError(
                "nothing of this name can be found here",
                key=f"{key}._target_",
                value=target,
                instead="check the spelling, install its package, or add its folder to PYTHONPATH",
            )


def _exists(target: str) -> bool:
    """Whether a dotted name stands for something, as far as sources tell.

    Nothing of it is imported: its imports may need a GPU, or torch, or just time that a login node has not.
    """
    parts = target.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    source = Path(spec.origin) if spec.origin else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    for depth, part in enumerate(parts[1:], start=1):
        package = next((folder / part for folder in folders if (folder / part).is_dir()), None)
        module = next((folder / f"{part}.py" for folder in folders if (folder / f"{part}.py").is_file()), None)
        if package is None and module is None:
            return _defines(source, part)
        source = package / "__init__.py" if package is not None else module
        folders = [package] if package is not None else []
        if depth == len(parts) - 1:
            return False  # a module is nothing to call
    return True


def _defines(source: Path | None, name: str) -> bool:
    """Whether a module's source gives a name at its top level; what can't be told from it counts as given."""
    try:
        tree = ast.parse(source.read_bytes()) if source is not None and source.suffix == ".py" else None
    except (OSError, SyntaxError, ValueError):
        tree = None
    if tree is None:
        return True
    given: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            given.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            given.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.add(node.id)
    return bool(given & {name, "*", "__getattr__"})


def _text_source(config: Any) -> list[UserError]:
    """Whether there is text to read, for the sources of this package."""
    from dthpc.data import corpus

    fraction = config.data.get("valid_fraction") if config.data.get("_target_") == TEXT_TARGET else None
    wrong_fraction = [] if fraction is None else corpus.check_fraction(fraction)
    source = config.data.get("source")
    target = str(source.get("_target_", "")) if hasattr(source, "get") else ""
    module, _, name = target.rpartition(".")
    # Inside a container, paths may be others than here.
    if module != corpus.__name__ or config.cluster.container.runtime is not None:
        return wrong_fraction
    kind = getattr(corpus, name, None)
    arguments = {str(key): value for key, value in source.items() if key != "_target_"}
    try:
        return wrong_fraction + (list(kind(**arguments).check()) if kind is not None else [])
    except TypeError as error:
        return [UserError(str(error), key="data.source", value=target, instead="check the keys of data.source")]


def _digits(config: Any) -> list[UserError]:
    """Whether the ranks will find the images of `data=digits`."""
    from dthpc.data import digits

    if config.data.get("_target_") != digits.TARGET:
        return []
    every = config.data.get("held_out_every")
    errors = list(digits.check_split(every)) if isinstance(every, int) else []
    cluster = config.cluster
    # Other interpreters than this one, and what the batch script loads, are only seen by the ranks.
    if cluster.python is None and cluster.container.runtime is None and not cluster.setup:
        try:
            digits.digits_file()
        except UserError as error:
            errors.append(error)
    return errors


def _missing(config: Any) -> list[UserError]:
    """Values that have no default and were not given."""
    from omegaconf import OmegaConf

    return [
        UserError("needs a value", key=str(key), instead=f"{key}=…") for key in sorted(OmegaConf.missing_keys(config))
    ]


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if config is not None else None
    return config


def _shown(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else None
