"""Runs that are stopped half-way and go on, in the same layout or another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dthpc.jobs import train as job
from tests.proof.cases import Case
from tests.proof.parallel import read_parameters, read_tensors, run_folder, train_on_rank
from tests.proof.reference import Trained
from tests.ranks import RankPool

HALF = 2
"""Updates after which a run is stopped."""

TRANSITIONS = (
    # Data parallelism and ZeRO stages, more and fewer ranks, powers of two or not.
    *(
        "dp > zero1",
        "zero1 > zero2",
        "zero2 > zero3",
        "zero3 > dp",
        "zero1 > zero1x3",
        "zero3x3 > zero3",
        "hsdp > zero1",
    ),
    *("zero3 > shard3", "replicate3 > zero2r2"),
    # Tensor and sequence parallelism.
    *("tp > dp", "zero3 > sp", "sp zero1 > tp zero2", "tp odd tied > zero3x3 odd tied", "tp classic > sp4 classic"),
    # Pipelines: other schedules, more stages, chunks of other sizes.
    *("gpipe > 1f1b", "1f1b > interleaved", "interleaved tied > 1f1bx3 tied", "zb_h1 > zbv", "1f1b tied > tp tied"),
    *("zbv zero1 > zb_h1 zero2", "tp 1f1b > zero3", "staged > zero2", "zbvx3 > chunks3 zero2"),
    # Whatever else may change, or must go on.
    *("zero1 dropout > sp 1f1b dropout recompute", "zero2 bf16s > tp bf16", "dp fp16 > zero3 fp16s"),
    *("zero1 overflow > tp overflow", "zero1 offload > zero3 files", "nvme > zero2", "vit tp > vit zero3 1f1b"),
)
"""Layouts before and after."""

AGAIN = (
    *(
        "accumulate2 dropout",
        "dp uneven",
        "zero1 tp clip",
        "zero2x3 bf16travel",
        "zero3 odd tied dropout",
        "hsdp bf16s",
    ),
    *("sp 1f1b recompute dropout", "interleaved tied", "zbv zero1 classic", "zb_h1 fp16 clip", "dp overflow"),
    *("zero3 files", "zero2 nvme bf16s"),
)
"""Layouts that go on as they are."""


def sides(transition: str) -> tuple[Case, Case]:
    """The layouts before and after."""
    before, after = transition.split(" > ")
    return Case.of(before), Case.of(after)


def change_layout(ranks: RankPool, before: Case, after: Case, mistake: Callable[[], Any] | None = None) -> Trained:
    """Train half-way in one layout, and the rest in another.

    Args:
        ranks: where to train.
        before: the first layout.
        after: the other one.
        mistake: a context in which the ranks go on.
    """
    with run_folder() as folder:
        first, *_ = ranks.run(before.ranks, train_on_rank, folder, before.overrides, None, HALF)
        assert len(first.losses) == HALF
        rest, *others = ranks.run(after.ranks, go_on, folder, after.overrides, mistake)
        rest.parameters = read_parameters(folder)
    rest.others = others
    for each in [rest, *others]:
        each.losses, each.norms = first.losses + each.losses, first.norms + each.norms
    return rest


def interrupted(ranks: RankPool, case: Case, stops: bool) -> tuple[Trained, dict[str, torch.Tensor]]:
    """A whole training, stopped half-way and gone on or not, and all tensors of its last checkpoint."""
    with run_folder() as folder:
        told = Trained()
        for stop in (HALF, None) if stops else (None,):
            part, *_ = ranks.run(case.ranks, train_on_rank, folder, case.overrides, None, stop)
            told.losses, told.norms, told.held_out = told.losses + part.losses, told.norms + part.norms, part.held_out
        return told, read_tensors(folder)


def go_on(rank: int, folder: str, overrides: dict[str, Any], mistake: Callable[[], Any] | None) -> Trained:
    """The rest of a run, on a rank."""
    with mistake() if mistake is not None else patch.dict({}):
        return train_on_rank(rank, folder, overrides)


def state_forgotten() -> AbstractContextManager[Any]:
    """The optimizer's state is not read."""
    return _after_restore(lambda state: state.optimizer.state.clear())


def state_displaced() -> AbstractContextManager[Any]:
    """The optimizer's state lies one element beside the parameters."""

    def displace(state: Any) -> None:
        for entries in state.optimizer.state.values():
            for value in entries.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    value.copy_(value.flatten().roll(1).view(value.shape))

    return _after_restore(displace)


def samples_again() -> AbstractContextManager[Any]:
    """The samples begin anew."""

    def rewind(state: Any) -> None:
        state.stateful["train"].samples = 0

    return _after_restore(rewind)


@contextmanager
def _after_restore(spoil: Callable[[Any], None]) -> Iterator[None]:
    kept = job.restore

    def restore(folder: Any, state: Any, **options: Any) -> Any:
        info = kept(folder, state, **options)
        with torch.no_grad():
            spoil(state)
        return info

    with patch.object(job, "restore", restore):
        yield
