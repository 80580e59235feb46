"""Pipeline schedules as data: for each rank the list of its actions, made by rule; free of torch.

A schedule says in which order a rank computes. What must travel follows from it: a stage takes the output of the
stage before it, and the gradient of its output from the stage after it. One rank's list is built without the others'.

    gpipe        all forward passes, then all backward passes (Huang et al. 2019); with one micro-batch it is plain
                 layer-wise model parallelism
    1f1b         one forward, one backward (PipeDream-Flush: Narayanan et al. 2021b, figure 4)
    interleaved  1f1b over several chunks of layers on each rank (Narayanan et al. 2021a, section 2.2)
    zb_h1        1f1b with the weight gradients left for the time of the bubble (Qi et al. 2024, section 2.1, figure 3)
    zbv          two chunks on each rank, laid out as a V, and no bubble where the three kinds of passes take equally
                 long (Qi et al. 2024, section 6, figure 7)
    pipedream    1f1b with an update after each backward pass (Narayanan et al. 2019)

Huang et al. 2019: "GPipe". Narayanan et al. 2019: "PipeDream". 2021a: "Efficient large-scale language model training on
GPU clusters using Megatron-LM". 2021b: "Memory-efficient pipeline-parallel DNN training". Qi et al. 2024: "Zero bubble
pipeline parallelism", ICLR.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, overload

from dthpc.errors import raise_together
from dthpc.parallel.pipeline.names import mistakes


class Kind(Enum):
    """What an action computes."""

    F = "F"
    """Forward pass of a stage."""

    B = "B"
    """Backward pass: gradients of the input and of the weights."""

    I = "I"  # noqa: E741
    """The gradient of the input only."""

    W = "W"
    """The gradients of the weights only, after `I`."""

    # Members hash by identity: the default goes through Python code, and schedules are made of millions of them.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; its text is `3F0`: stage 3, forward, micro-batch 0."""

    kind: Kind
    """What is computed."""

    stage: int
    """Position in the pipeline, over all ranks."""

    micro_batch: int
    """Number within the step."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action whose text this is.

        Raises:
            ValueError: it is no action's.
        """
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no action; 3F0 is one: stage 3, forward, micro-batch 0")
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stages."""

    ranks: int
    """Pipeline degree."""

    chunks: int
    """Stages on each rank."""

    v_shaped: bool = False
    """Whether every second round over the ranks runs backwards (0 1 2 2 1 0), instead of 0 1 2 0 1 2."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk of that number."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self.v_shaped and chunk % 2 else rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of its chunks."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.chunks))


@dataclass(frozen=True)
class Schedule:
    """The order of work of every rank, for one step."""

    name: str
    """Which rule it follows."""

    ranks: int
    """Pipeline degree."""

    chunks: int
    """Chunks of layers on each rank."""

    micro_batches: int
    """Micro-batches in a step."""

    actions: Sequence[tuple[Action, ...]]
    """For each rank its actions, in order; `build` gives a sequence that makes a rank's when they are asked for."""

    @property
    def placement(self) -> Placement:
        """Which rank holds which stages."""
        return Placement(self.ranks, self.chunks, v_shaped=self.name == "zbv")

    @property
    def stages(self) -> int:
        """Stages over all ranks."""
        return self.ranks * self.chunks

    @property
    def stale(self) -> bool:
        """Whether each stage is updated after each of its backward passes, instead of once at the step's end."""
        return self.name == "pipedream" and self.ranks > 1

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.placement.rank_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of its chunks."""
        return self.placement.stages_of(rank)

    def weight_version(self, stage: int, micro_batch: int) -> int:
        """The weights that a micro-batch meets in a stage, in its forward and its backward pass.

        Returns:
            How many updates of this step they have; 0 except for `pipedream`, whose forward passes before the first
            backward pass meet the weights that the step began with, and later ones weights that lack
            `ranks - 1 - stage` updates of those that the micro-batches before it will have made (Narayanan et al.
            2019, section 3.3, weight stashing).
        """
        return max(0, micro_batch - (self.ranks - 1 - stage)) if self.stale else 0


def build(name: str, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """The schedule of that name; takes no time, as a rank's actions are made when they are asked for.

    Args:
        name: one of `names.SCHEDULES`.
        ranks: pipeline degree.
        chunks: chunks of layers on each rank.
        micro_batches: micro-batches in a step.

    Raises:
        UserError: the schedule does not exist or cannot have these sizes.
    """
    raise_together(mistakes(name, ranks, chunks, micro_batches))
    return Schedule(name, ranks, chunks, micro_batches, _OnDemand(name, ranks, chunks, micro_batches))


def actions_of(name: str, rank: int, ranks: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """One rank's actions, in order; arguments and errors as for `build`."""
    raise_together(mistakes(name, ranks, chunks, micro_batches))
    placement = Placement(ranks, chunks, v_shaped=name == "zbv")
    if ranks == 1:
        order = _one_by_one(chunks, micro_batches)
    elif name == "gpipe":
        order = _gpipe(micro_batches)
    elif name == "zb_h1":
        order = _zb_h1(rank, ranks, micro_batches)
    elif name == "zbv":
        order = _zbv(rank, ranks, micro_batches)
    elif chunks > 1:
        order = _interleaved(rank, ranks, chunks, micro_batches)
    else:
        order = _1f1b(rank, ranks, micro_batches)
    stages = placement.stages_of(rank)
    return tuple(Action(kind, stages[chunk], micro_batch) for kind, chunk, micro_batch in order)


class _OnDemand(Sequence[tuple[Action, ...]]):
    """Every rank's actions, each made when it is asked for."""

    def __init__(self, name: str, ranks: int, chunks: int, micro_batches: int) -> None:
        self._arguments = (name, ranks, chunks, micro_batches)

    def __len__(self) -> int:
        return self._arguments[1]

    @overload
    def __getitem__(self, rank: int) -> tuple[Action, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[tuple[Action, ...]]: ...

    def __getitem__(self, rank: int | slice) -> tuple[Action, ...] | Sequence[tuple[Action, ...]]:
        name, ranks, chunks, micro_batches = self._arguments
        if isinstance(rank, slice):
            return [self[one] for one in range(ranks)[rank]]
        return actions_of(name, range(ranks)[rank], ranks, chunks, micro_batches)


Order = Iterator[tuple[Kind, int, int]]
"""What one rank does: kind of pass, chunk, micro-batch."""


def _one_by_one(chunks: int, micro_batches: int) -> Order:
    for micro_batch in range(micro_batches):
        yield from ((Kind.F, chunk, micro_batch) for chunk in range(chunks))
        yield from ((Kind.B, chunk, micro_batch) for chunk in reversed(range(chunks)))


def _gpipe(micro_batches: int) -> Order:
    yield from ((Kind.F, 0, k) for k in range(micro_batches))
    yield from ((Kind.B, 0, k) for k in range(micro_batches))


def _1f1b(rank: int, ranks: int, micro_batches: int) -> Order:
    warm_up = min(ranks - 1 - rank, micro_batches)
    for k in range(micro_batches + warm_up):
        if k < micro_batches:
            yield Kind.F, 0, k
        if k >= warm_up:
            yield Kind.B, 0, k - warm_up


def _interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> Order:
    """1F1B over pairs of chunk and micro-batch: `ranks` micro-batches pass a chunk, then the next has its turn."""
    total = micro_batches * chunks
    # Before its first backward pass a rank must have done the forward passes of all chunks but the last for the first
    # round of micro-batches, and one for each hop of the way to the last rank and back.
    warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    for k in range(total + warm_up):
        if k < total:
            yield Kind.F, k // ranks % chunks, k // (ranks * chunks) * ranks + k % ranks
        if k >= warm_up:
            b = k - warm_up
            yield Kind.B, chunks - 1 - b // ranks % chunks, b // (ranks * chunks) * ranks + b % ranks


def _zb_h1(rank: int, ranks: int, micro_batches: int) -> Order:
    """1F1B's forward and input gradients; a rank keeps as many weight gradients waiting as it has ranks before it.

    So the last rank returns input gradients sooner by `ranks - 1` weight passes, which it makes up for at the end,
    and every rank holds at most `ranks` activations, as the first rank of 1F1B does.
    """
    for kind, chunk, k in _1f1b(rank, ranks, micro_batches):
        if kind is Kind.F:
            yield kind, chunk, k
            continue
        yield Kind.I, chunk, k
        if k >= rank:
            yield Kind.W, chunk, k - rank
    yield from ((Kind.W, 0, k) for k in range(max(0, micro_batches - rank), micro_batches))


def _zbv(rank: int, ranks: int, micro_batches: int) -> Order:
    """The V: chunk 0 runs down the ranks and chunk 1 back up, so that rank 0 holds the first stage and the last."""
    # The rule is for pipelines that fill up; a shorter step is such a one with micro-batches left out.
    passes = _zbv_full(rank, ranks, max(micro_batches, 2 * ranks - 1))
    return (one for one in passes if one[2] < micro_batches)


def _zbv_full(rank: int, ranks: int, micro_batches: int) -> Order:
    done = {(kind, chunk): 0 for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1)}

    def follow(*passes: tuple[Kind, int]) -> Order:
        for kind, chunk in passes:
            yield kind, chunk, done[kind, chunk]
            done[kind, chunk] += 1

    down, up = ((Kind.F, 0), (Kind.I, 0), (Kind.W, 0)), ((Kind.F, 1), (Kind.I, 1), (Kind.W, 1))
    # Fill: the first micro-batch needs twice the ranks below this one, plus one, to go down and come back up.
    for _ in range(2 * (ranks - rank) - 1):
        yield from follow((Kind.F, 0))
    for _ in range(rank):
        yield from follow((Kind.F, 1), (Kind.F, 0))
    for _ in range(ranks - rank):
        yield from follow(*up)
    # Full: one pass of each kind for each chunk.
    while done[Kind.F, 1] < micro_batches:
        yield from follow(*(down if done[Kind.F, 0] < micro_batches else down[1:]), *up)
    # Empty: input gradients that others wait for go first, and the weight gradients fill the gaps.
    for _ in range(rank):
        yield from follow((Kind.I, 0), (Kind.I, 1))
    while done[Kind.I, 0] < micro_batches:
        yield from follow((Kind.I, 0), (Kind.W, 0))
    for chunk in (1, 0):
        while done[Kind.W, chunk] < micro_batches:
            yield from follow((Kind.W, chunk))
