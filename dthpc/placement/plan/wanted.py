"""From the configuration to what a launch plan says of the placement, and back to a wish: plain JSON in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus, parse_cpus
from dthpc.placement.plan.wish import Wish, axes_of

BIND = ("auto", "rank", "srun", "none")
"""Who binds ranks to their cores (`placement.bind`)."""

MEMORY = ("prefer", "bind", "none")
"""Pages come from the rank's memory nodes as long as these have room; only from these; from wherever a thread runs."""

OMP_BIND = ("false", "close", "spread")


def wanted_of(
    placement: Any, ranks: int, gpus: int, threads: int, degrees: Mapping[str, int], order: list[str]
) -> dict[str, Any]:
    """What a launch plan says of the placement, as plain JSON for `bind_rank`.

    Args:
        placement: the group `placement` of the configuration.
        ranks: ranks of a node.
        gpus: GPUs of a node.
        threads: numeric threads of a rank.
        degrees: degree of each axis of the layout.
        order: axes from the outermost to the innermost.

    Raises:
        UserError: a value is malformed.
    """
    wish = asdict(read_wish(placement, ranks, gpus, degrees, order))
    wish.update(reserved=format_cpus(wish["reserved"]), axes=[list(axis) for axis in wish["axes"]])
    for name, words in (("bind", BIND), ("memory", MEMORY), ("omp_bind", OMP_BIND)):
        demand(f"placement.{name}", str(getattr(placement, name)), words)
    return {
        "bind": str(placement.bind),
        "strict": bool(placement.strict),
        "memory": str(placement.memory),
        "omp_bind": str(placement.omp_bind),
        "threads": threads,
        "topology": placement.topology,
        "by_switch": bool(placement.by_switch),
        "wish": wish,
    }


def wish_of(wanted: Mapping[str, Any]) -> Wish:
    """The wish in what `wanted_of` made."""
    told = dict(wanted["wish"])
    axes = tuple((str(name), int(degree)) for name, degree in told.pop("axes"))
    return Wish(**{**told, "axes": axes, "reserved": parse_cpus(told["reserved"], "placement.reserve")})


def read_wish(placement: Any, ranks: int, gpus: int | None, degrees: Mapping[str, int], order: Sequence[str]) -> Wish:
    """The wish of a configuration.

    Args:
        placement: the group `placement`.
        ranks: ranks of a node.
        gpus: GPUs of a node; `None`: as many as fit.
        degrees: degree of each axis of the layout.
        order: axes from the outermost to the innermost.

    Raises:
        UserError: a value is malformed.
    """
    reserve = None if placement.reserve is None else str(placement.reserve)
    words = reserve in ("l3", "numa")
    return Wish(
        ranks=ranks,
        gpus=gpus,
        cores_per_rank=placement.cores_per_rank,
        helpers=placement.helpers,
        smt=str(placement.smt),
        reserved=frozenset() if reserve is None or words else parse_cpus(reserve, "placement.reserve"),
        reserve=reserve if words else None,
        nics=placement.nics,
        axes=axes_of(order, degrees),
    )


def demand(key: str, value: str, words: Sequence[str]) -> None:
    """Refuse a value that is none of the words.

    Raises:
        UserError: it is none.
    """
    if value not in words:
        raise UserError("is no such policy", key=key, value=value, instead="one of " + ", ".join(words))
