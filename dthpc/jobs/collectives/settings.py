"""The job's keys as values that are known to be sound, and the mistakes in them; free of torch, for the login node."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.errors import UserError, nearest, raise_together
from dthpc.jobs.collectives.groups import check_groups, degrees_alone
from dthpc.jobs.collectives.room import free_memory, largest_message
from dthpc.jobs.collectives.terms import OPERATIONS
from dthpc.monitor.units import size as in_bytes
from dthpc.parallel.check import AXES
from dthpc.parallel.check import check as check_degrees
from dthpc.rundir import read_json

TARGET = "dthpc.jobs.collectives.job.run"
BACKENDS = ("gloo", "mpi", "nccl", "raw_gloo", "raw_mpi")
GROUPS = ("world", "node", "cross", *AXES)
DTYPES = ("fp64", "fp32", "fp16", "bf16", "int64", "int32", "int8", "uint8")
REDOPS = ("sum", "avg", "min", "max")
FORMS = {"both": (False, True), "true": (True,), "false": (False,)}
PAIRS = ("auto", "nodes", "ranks", "both", "none")
SCHEMA = 1
"""Version of the form of `collectives.json`; it changes when a field changes its meaning or goes."""

_MOST_CALLS = 10**6

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_EXAMPLE = "8, 64K, 8-64M, 8-1G*2 or 8-max"


@dataclass(frozen=True)
class Span:
    """Sizes from one to another, each a multiple of the one before."""

    first: int
    """Bytes."""

    last: int | None
    """Bytes; None: as many as fit."""

    factor: int = 4
    """Of two neighbours."""

    def upto(self, limit: int) -> Iterator[int]:
        """Its sizes of at most `limit` bytes."""
        last = limit if self.last is None else min(self.last, limit)
        size = self.first
        while size < last:
            yield size
            size *= self.factor
        if self.first <= last and (self.last is None or self.last <= limit):
            yield last


@dataclass(frozen=True)
class Settings:
    """What is to be measured."""

    spans: tuple[Span, ...]
    operations: tuple[str, ...]
    backends: tuple[str, ...] | None
    """None: all that work."""

    groups: tuple[str, ...] | None
    """None: all that differ."""

    dtype: str
    redop: str
    forms: tuple[bool, ...]
    """In place or not."""

    iterations: int | None
    seconds: float
    warmup: int
    check: bool
    memory_share: float
    pairs: str
    pair_size: int
    hierarchical: bool
    link_gbps: float | None
    reference: str | None
    slow: float
    plots: bool

    def sizes(self, limit: int) -> list[int]:
        """All sizes of at most `limit` bytes, ascending."""
        return sorted({size for span in self.spans for size in span.upto(limit)})

    def beyond(self, limit: int) -> int | None:
        """The largest size that was asked for and does not fit; None if all do."""
        largest = max(span.last or 0 for span in self.spans)
        return largest if largest > limit else None


def parse_size(text: Any, key: str = "job.sizes") -> int:
    """Bytes of `8`, `64K`, `4MiB`.

    Raises:
        UserError: it is no size, or nought.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= 1 << 50 or isinstance(text, bool):
        raise UserError("is no message size", key=key, value=text, instead=_EXAMPLE if key == "job.sizes" else "4M")
    return size


def parse_spans(value: Any, key: str = "job.sizes") -> tuple[Span, ...]:
    """The spans of one size, one range, or a list of them; see `CollectivesJob.sizes`.

    Raises:
        UserError: a part can't be read, or a range runs backwards; all of them are told.
    """
    parts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else str(value).split(",")
    spans, errors = [], []
    for part in parts:
        try:
            spans.append(_span(str(part).strip(), key))
        except UserError as error:
            errors.append(error)
    if not parts:
        errors.append(UserError("there is nothing to measure", key=key, instead=_EXAMPLE))
    raise_together(errors)
    return tuple(spans)


def _span(text: str, key: str) -> Span:
    match = re.fullmatch(r"([^-*]+)-([^-*]+)(?:\*\s*(\d+))?", text)
    if match is None:
        size = parse_size(text, key)
        return Span(size, size)
    first = parse_size(match[1], key)
    last = None if match[2].strip().lower() == "max" else parse_size(match[2], key)
    factor = int(match[3] or 4)
    if factor < 2 or (last is not None and last < first):
        why = "sizes grow by a factor of at least 2" if factor < 2 else "the range runs backwards"
        raise UserError(why, key=key, value=text, instead=_EXAMPLE)
    return Span(first, last, factor)


def settings_of(config: Any) -> Settings:
    """The job's keys.

    Args:
        config: the whole configuration, resolved.

    Raises:
        UserError: the mistakes that `check` finds.
    """
    raise_together(check(config))
    job = config.job
    return Settings(
        spans=parse_spans(job.sizes),
        operations=OPERATIONS if "all" in job.operations else tuple(dict.fromkeys(job.operations)),
        backends=None if "auto" in job.backends else tuple(dict.fromkeys(job.backends)),
        groups=None if "auto" in job.groups else tuple(dict.fromkeys(job.groups)),
        dtype=job.dtype,
        redop=job.redop,
        forms=FORMS[str(job.in_place).lower()],
        iterations=job.iterations,
        seconds=job.seconds,
        warmup=job.warmup,
        check=job.check,
        memory_share=job.memory_share,
        pairs=job.pairs,
        pair_size=parse_size(job.pair_size, "job.pair_size"),
        hierarchical=job.hierarchical,
        link_gbps=job.link_gbps,
        reference=job.reference,
        slow=job.slow,
        plots=job.plots,
    )


def check(config: Any) -> list[UserError]:
    """Mistakes in the keys of `job=collectives`, and in the layout that it measures; none for any other job."""
    if not measures(config):
        return []
    job = config.job
    errors = [*_sizes(job), *_words(job), *_numbers(job), *_backends(config), *_reference(job)]
    errors += [] if errors else _memory(config)
    degrees = check_degrees(degrees_alone(config))
    return [*errors, *degrees] if degrees else [*errors, *check_groups(config)]


def measures(config: Any) -> bool:
    """Whether a configuration runs `job=collectives`, which trains nothing."""
    return hasattr(config.job, "get") and config.job.get("_target_") == TARGET


def _sizes(job: Any) -> Iterator[UserError]:
    for read in (lambda: parse_spans(job.sizes), lambda: parse_size(job.pair_size, "job.pair_size")):
        try:
            read()
        except UserError as error:
            yield from getattr(error, "errors", [error])


def no_room(limit: int) -> UserError:
    """What is told where memory is too small for the smallest message.

    Args:
        limit: bytes of the largest message that fits.
    """
    return UserError(
        f"no size fits: there is memory for messages of {in_bytes(limit)}",
        key="job.sizes",
        instead="smaller ones, more memory, or a larger job.memory_share",
    )


def _memory(config: Any) -> list[UserError]:
    """Sizes of which a local run has room for none; of other machines only the ranks know."""
    if config.cluster.kind != "local":
        return []
    limit = largest_message(free_memory(), int(config.cluster.tasks_per_node), config.job.memory_share)
    fits = any(size for span in parse_spans(config.job.sizes) for size in span.upto(limit))
    return [] if fits else [no_room(limit)]


def _words(job: Any) -> Iterator[UserError]:
    lists = {"operations": (*OPERATIONS, "all"), "backends": (*BACKENDS, "auto"), "groups": (*GROUPS, "auto")}
    for name, valid in lists.items():
        given = list(job.get(name) or [])
        if not given:
            yield UserError("there is nothing to measure", key=f"job.{name}", value="[]", instead=f"[{valid[-1]}]")
        for word in given:
            if word not in valid:
                dp = "replicate (whole replicas) or shard (ZeRO)" if (name, word) == ("groups", "dp") else None
                hint = dp or nearest(str(word), valid)
                yield UserError("no such choice", key=f"job.{name}", value=word, instead=hint)
    for name, valid in {"dtype": DTYPES, "redop": REDOPS, "in_place": tuple(FORMS), "pairs": PAIRS}.items():
        word = str(job.get(name)).lower()
        if word not in valid:
            yield UserError("no such choice", key=f"job.{name}", value=word, instead=nearest(word, valid))
    if job.get("redop") == "avg" and "int" in str(job.get("dtype")):
        yield UserError("whole numbers have no average", key="job.redop", value="avg", instead="job.redop=sum")


def _numbers(job: Any) -> Iterator[UserError]:
    smallest = {"iterations": 1, "warmup": 0}
    for name, least in smallest.items():
        value = job.get(name)
        if value is not None and value < least:
            yield UserError("too small", key=f"job.{name}", value=value, instead=f"give at least {least}")
        elif value is not None and value > _MOST_CALLS:
            why = "of every operation and size: that would take for ever"
            yield UserError(why, key=f"job.{name}", value=value, instead=f"at most {_MOST_CALLS}")
    for name, most in {"seconds": 3600.0, "link_gbps": math.inf, "memory_share": 0.9, "slow": 1.0}.items():
        value = job.get(name)
        if value is not None and not (0 < value <= most and value < math.inf):
            allowed = "a positive number" if most == math.inf else f"a number above 0, at most {most:g}"
            yield UserError("out of range", key=f"job.{name}", value=value, instead=allowed)


def _backends(config: Any) -> Iterator[UserError]:
    cluster, wanted = config.cluster, list(config.job.get("backends") or [])
    if "nccl" in wanted and not (cluster.gpus_per_node or cluster.gpus_per_task):
        yield UserError(
            "NCCL moves data between GPUs, and this run asks for none",
            key="job.backends",
            value="nccl",
            instead="gloo, or cluster.gpus_per_node=N",
        )
    by_mpi = [word for word in wanted if word in ("mpi", "raw_mpi")]
    if by_mpi and "mpi" not in str(config.comm.backend) and not cluster.srun.get("mpi"):
        yield UserError(
            "MPI needs ranks that its launcher has started",
            key="job.backends",
            value=",".join(by_mpi),
            instead="add comm.backend=mpi; Gloo can be measured in the same run",
        )
    if "raw_mpi" in wanted and (config.job.get("dtype") in ("fp16", "bf16") or config.job.get("redop") == "avg"):
        yield UserError(
            "MPI itself has no 16-bit floating-point numbers and no average",
            key="job.backends",
            value="raw_mpi",
            instead="job.dtype=fp32 job.redop=sum, or leave raw_mpi out",
        )


def _reference(job: Any) -> Iterator[UserError]:
    path = job.get("reference")
    if path is None:
        return
    stored = read_json(Path(path)) if Path(path).is_file() else None
    if not isinstance(stored, dict) or "lines" not in stored or stored.get("schema") != SCHEMA:
        why = "is no collectives.json of this version" if Path(path).exists() else "there is no such file"
        yield UserError(
            why, key="job.reference", value=path, instead="collectives.json in the folder of an earlier job=collectives"
        )
