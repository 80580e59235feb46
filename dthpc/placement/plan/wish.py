"""What a placement is asked for: numbers of ranks and GPUs on a node, and how its cores are dealt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet

SMT = ("one", "all", "spread")
"""How hardware threads are used: the first thread of each core; all threads; ranks compute on the first threads and
their helpers on the others of the same cores."""

RESERVE = ("l3", "numa")
"""Words for reserved cores: the first core of each L3 domain, or of each memory node."""

MOST_RANKS = 65_536
"""Most ranks of a node: Linux knows no more CPUs."""

TALK = {"tp": 4096, "cp": 512, "ep": 64, "shard": 64, "dp": 64, "replicate": 32, "pp": 8}
"""How much two ranks talk that differ in one axis alone, relative to each other. Tensor parallelism exchanges
activations several times a layer, context parallelism once a layer, experts and gradients less often, pipeline
neighbours only one activation a micro-batch: the order matters, the numbers do not."""


@dataclass(frozen=True)
class Wish:
    """What the ranks of one node need."""

    ranks: int
    """Ranks on the node."""

    gpus: int | None = None
    """GPUs (or pieces) that they use together; `None`: one a rank, as far as there are; 0: none."""

    cores_per_rank: int | None = None
    """Cores of each rank, helpers included; `None`: its whole share of the cores nearest to its GPU."""

    helpers: int | None = None
    """Cores of a rank's share that data loading and communication threads get for themselves; `None`: a quarter of
    them for a rank with a GPU, a sixteenth for one without."""

    smt: str = "one"
    """One of `SMT`."""

    reserved: CpuSet = frozenset()
    """CPUs left alone, with all threads of their cores."""

    reserve: str | None = None
    """One of `RESERVE`, on top of `reserved`."""

    nics: int | None = None
    """NICs of each rank; `None`: an even share of those nearest to its GPU."""

    allowed: CpuSet | None = None
    """CPUs that may be used, where it is not what the topology says."""

    visible: Sequence[str] | None = None
    """GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them; `None`: all."""

    axes: Sequence[tuple[str, int]] = ()
    """Axes of the layout with their degrees, innermost first; they say which ranks talk most."""

    def __post_init__(self) -> None:
        _at_least("cluster.tasks_per_node", self.ranks, 1)
        _at_most("cluster.tasks_per_node", self.ranks, MOST_RANKS)
        _at_least("placement.cores_per_rank", self.cores_per_rank, 1)
        _at_least("placement.helpers", self.helpers, 0)
        _at_least("placement.nics", self.nics, 1)
        _at_least("cluster.gpus_per_node", self.gpus, 0)
        _one_of("placement.smt", self.smt, SMT)
        if self.reserve is not None:
            _one_of("placement.reserve", self.reserve, RESERVE)


def talk(a: int, b: int, axes: Sequence[tuple[str, int]]) -> int:
    """How much two ranks talk: the weight of the axis in which alone they differ, else 0.

    Args:
        a: number of a rank among those of its node.
        b: number of another.
        axes: axes with their degrees, innermost first.
    """
    differing = []
    for name, degree in axes:
        if a % degree != b % degree:
            differing.append(name)
        a, b = a // degree, b // degree
    return TALK.get(differing[0], 0) if len(differing) == 1 and a == b else 0


def axes_of(order: Sequence[str], degrees: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Axes with more than one rank, innermost first.

    Args:
        order: axes from the outermost to the innermost (`parallel.order`).
        degrees: degree of each.
    """
    return tuple((name, degrees[name]) for name in reversed(order) if degrees.get(name, 1) > 1)


def _at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"must be at least {least}", key=key, value=value, instead=f"{key}={least}")


def _at_most(key: str, value: int, most: int) -> None:
    if value > most:
        raise UserError("more than any node has CPUs", key=key, value=value, instead=f"at most {most}")


def _one_of(key: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise UserError("is no such policy", key=key, value=value, instead="one of " + ", ".join(words))
