from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.data.loader import StepBatch
from dthpc.errors import UserError
from dthpc.models.losses import IGNORE, next_token
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.model import ParallelModel
from dthpc.train.header import Agreed, Header
from dthpc.train.step import check_result, expected_count, forward_backward
from tests.ranks import pool
from tests.train import step_tasks
from tests.train.tasks import make_config

CPU = torch.device("cpu")


class Net(nn.Module):
    """Logits by a table, and a buffer that counts the samples that went through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += len(tokens)
        return self.table(tokens)


def build(micro_batch: int | None = None, loss: Any = next_token, **groups: Any) -> ParallelModel:
    config = make_config(train={"global_batch": 4, "micro_batch": micro_batch}, **groups)
    return parallelize(Net(), loss, make_mesh(Layout(), "cpu"), config, CPU)


def batch(count: int = 4, ignored: int = 3) -> StepBatch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(5, (count, 6), generator=generator)
    targets = torch.randint(5, (count, 6), generator=generator)
    targets.view(-1)[:ignored] = IGNORE
    return StepBatch(inputs, targets, count, 0.0)


def step(model: ParallelModel, given: StepBatch, first: bool = False, **sent: Any) -> tuple[Agreed, float]:
    header = Header(None)
    header.send(**{"targets": expected_count(model.loss, given.targets), **sent})
    return forward_backward(model, given, header, CPU, step=0, first=first)


def gradient(model: ParallelModel) -> torch.Tensor:
    (piece,) = model.shards.pieces
    return torch.zeros(25) if piece.tensor.grad is None else piece.tensor.grad.flatten().clone()


def seen(model: ParallelModel) -> int:
    return int(model.buffers[0])


@pytest.mark.parametrize("micro_batch", [None, 1, 3, 4, 99])
def test_the_gradient_is_that_of_the_mean_over_all_targets_however_it_is_cut(micro_batch: int | None) -> None:
    model, given = build(micro_batch), batch()
    agreed, total = step(model, given)
    reference = Net()
    mean = nn.functional.cross_entropy(
        reference(given.inputs).flatten(0, -2), given.targets.flatten(), ignore_index=IGNORE
    )
    mean.backward()
    assert agreed.targets == 4 * 6 - 3
    assert total == pytest.approx(mean.item() * agreed.targets, rel=1e-6)
    torch.testing.assert_close(gradient(model), reference.table.weight.grad.flatten())


def test_the_mean_is_over_the_targets_of_all_ranks() -> None:
    alone, among_others = build(), build()
    step(alone, batch())
    step(among_others, batch(), targets=2 * 21)
    torch.testing.assert_close(gradient(among_others), gradient(alone) / 2)


def test_a_step_starts_from_no_gradient() -> None:
    model = build()
    step(model, batch())
    first = gradient(model)
    step(model, batch())
    assert torch.equal(gradient(model), first)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_where_the_ranks_agreed_to_stop_nothing_has_changed(micro_batch: int | None) -> None:
    model = build(micro_batch)
    step(model, batch())
    weights = [parameter.clone() for parameter in model.module.parameters()]
    agreed, total = step(model, batch(), stop="SIGTERM")
    assert (agreed.stop, total) == ("SIGTERM", 0.0)
    assert seen(model) == 4
    assert not gradient(model).any()
    assert all(torch.equal(old, new) for old, new in zip(weights, model.module.parameters(), strict=True))


def test_buffers_keep_what_a_step_did_to_them() -> None:
    model = build(1)
    step(model, batch())
    assert seen(model) == 4


@pytest.mark.parametrize("stop", [None, "SIGTERM"])
def test_a_rank_without_samples_still_hears_what_was_agreed(stop: str | None) -> None:
    model = build(parallel={"allow_unused": True})
    given = batch()
    empty = StepBatch(given.inputs[:0], given.targets[:0], 4, 0.0)
    agreed, total = step(model, empty, targets=9, stop=stop)
    assert (agreed.targets, agreed.stop, total) == (9, stop, 0.0)
    assert not gradient(model).any()


def test_a_step_in_which_nothing_counts_divides_by_nothing() -> None:
    model = build()
    agreed, total = step(model, batch(ignored=24))
    assert (agreed.targets, total) == (0, 0.0)
    assert torch.isfinite(gradient(model)).all()


def all_positions(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.float().square().sum(), torch.tensor(targets.numel())


class WithCount:
    """A loss that tells how it counts."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return all_positions(outputs, targets)

    def count_targets(self, targets: torch.Tensor) -> int:
        return targets.numel()


def test_a_loss_that_counts_otherwise_than_it_says_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="counted 24 targets where 21 were expected") as caught:
        step(build(1, all_positions), batch())
    assert (caught.value.key, caught.value.value) == ("loss._target_", f"{__name__}.all_positions")
    assert "count_targets" in str(caught.value.instead)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: (nn.functional.cross_entropy(o.flatten(0, -2), t.flatten(), reduction="none"), 21), "no scalar"),
        (lambda o, t: o.sum(), "only one value"),
        (lambda o, t: (o.sum(), 21, 0), "3 values"),
        (lambda o, t: (o.sum().item(), 21), "no tensor, but a value of type float"),
        (lambda o, t: (o.sum().detach(), 21), "detached"),
        (lambda o, t: (o.sum(), 21.5), "no integer, but a value of type float"),
        (lambda o, t: (o.sum(), torch.tensor(21.0)), "no integer, but a torch.float32 tensor"),
        (lambda o, t: (o.sum(), None), "no integer, but a value of type NoneType"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told_in_the_first_step(loss: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        step(build(1, loss), batch(), first=True)
    assert caught.value.key == "loss._target_"
    assert "(sum, count)" in str(caught.value.instead)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(all_positions, "all_positions"), (partial(all_positions), "all_positions"), (WithCount(), "WithCount")],
)
def test_a_loss_is_named_as_the_configuration_does(loss: Any, name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_result(loss, None)
    assert caught.value.value == f"{__name__}.{name}"


@pytest.mark.parametrize("count", [21, torch.tensor(21), torch.tensor(21, dtype=torch.int32)])
def test_a_loss_may_count_with_any_integer(count: Any) -> None:
    agreed, _ = step(build(loss=lambda o, t: (o.sum(), count)), batch(), first=True)
    assert agreed.targets == 21


def test_a_loss_that_says_how_it_counts_is_believed() -> None:
    agreed, _ = step(build(1, WithCount()), batch())
    assert agreed.targets == 24


@pytest.mark.parametrize(("loss", "count"), [(next_token, 21), (all_positions, 21), (WithCount(), 24)])
def test_the_count_is_known_before_the_forward_pass(loss: Callable[..., Any], count: int) -> None:
    found = expected_count(loss, batch().targets)
    assert (found, type(found)) == (count, int)


STOPPED = [
    {"parallel": {"pp": 2}},
    {"parallel": {"pp": 2, "schedule": "zb_h1", "zero": 2}},
    {"parallel": {"tp": 2}},
    {"parallel": {"zero": 1}},
    {"parallel": {"zero": 2}},
    {"parallel": {"zero": 3}},
]


@pytest.mark.parametrize("changes", STOPPED)
def test_a_step_that_is_given_up_leaves_nothing_behind_in_any_layout(changes: dict[str, Any]) -> None:
    for given_up, stopped, plain in pool().run(4, step_tasks.after_a_stop, changes):
        assert stopped == "SIGTERM"
        assert len(plain) > 0
        assert all(torch.equal(one, other) for one, other in zip(given_up, plain, strict=True))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_without_samples_stops_with_the_others_and_takes_part_in_the_next_step(zero: int) -> None:
    changes = {"parallel": {"zero": zero}, "train": {"global_batch": 2}}
    for given_up, stopped, plain in pool().run(3, step_tasks.after_a_stop, changes, True):
        assert stopped == "SIGTERM"
        assert all(torch.equal(one, other) for one, other in zip(given_up, plain, strict=True))


@pytest.mark.parametrize(("zero", "pp", "passes"), [(0, 1, (2, 1)), (1, 1, (2, 1)), (2, 1, (2, 2)), (3, 1, (2, 2))])
def test_all_ranks_make_equally_many_passes_where_others_wait_in_them(
    zero: int, pp: int, passes: tuple[int, int]
) -> None:
    assert tuple(pool().run(2, step_tasks.passes_made, zero, pp)) == passes
