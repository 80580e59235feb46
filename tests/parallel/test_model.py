from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dthpc.models.gpt import GPT
from dthpc.models.losses import next_token
from dthpc.parallel.model import CheckedLoss, persistent_buffers
from tests.parallel import tasks
from tests.ranks import pool

WHOLE = sum(parameter.numel() for parameter in GPT(**tasks.SIZES).parameters())


def test_only_buffers_that_are_saved_are_kept_in_step() -> None:
    assert persistent_buffers(GPT(vocab_size=8, dim=8, layers=1, heads=2)) == []
    assert len(persistent_buffers(nn.BatchNorm1d(3))) == 3


def test_a_loss_is_looked_at_only_while_that_is_asked_for() -> None:
    seen: list[Any] = []
    loss = CheckedLoss(next_token, lambda outputs, targets: (outputs, targets))
    assert loss(1, 2) == (1, 2)
    loss.check = lambda configured, result: seen.append((configured, result))
    assert loss(3, 4) == (3, 4)
    assert seen == [(next_token, (3, 4))]


def test_a_pipeline_rank_knows_its_stages_and_who_has_the_loss() -> None:
    ranks = pool().run(4, tasks.facts, {"pp": 2, "schedule": "interleaved"})
    assert [rank["stages"] for rank in ranks] == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert [rank["last"] for rank in ranks] == [False, False, True, True]
    assert len({rank["stream"] for rank in ranks}) == 4
    assert {rank["elements"] for rank in ranks} == {WHOLE}
    # The embedding and the head are one weight, on both ends.
    assert ranks[0]["held"] + ranks[2]["held"] == WHOLE + 32 * 16
    assert {rank["passes"] for rank in ranks} == {4}
    assert {rank["micro_batch"] for rank in ranks} == {1}


def test_of_tensor_parallel_ranks_one_counts_and_all_draw_the_same_numbers() -> None:
    ranks = pool().run(4, tasks.facts, {"tp": 2})
    assert [rank["counts"] for rank in ranks] == [True, False, True, False]
    assert [rank["stream"] for rank in ranks] == [0, 0, 1, 1]


@pytest.mark.parametrize(("zero", "passes"), [(0, None), (1, None), (2, 1), (3, 1)])
def test_passes_are_fixed_where_others_wait_in_them(zero: int, passes: int | None) -> None:
    assert {rank["passes"] for rank in pool().run(2, tasks.facts, {"zero": zero})} == {passes}


LAYOUTS = [{}, {"pp": 2}, {"tp": 2}, {"zero": 1}, {"zero": 3}]


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_only_a_larger_norm_is_clipped_and_the_one_before_is_told(parallel: dict[str, Any]) -> None:
    ranks = pool().run(2, tasks.trained_by, None, parallel)
    norm = ranks[0][0]
    assert [told for told, _ in ranks] == [norm] * 2
    for share, expected in ((2.0, norm), (0.5, 0.5 * norm)):
        again = pool().run(2, tasks.trained_by, share * norm, parallel)
        assert [told for told, _ in again] == [norm] * 2
        # Replicas hold all of it; other ranks parts.
        counted = again[:1] if not parallel else again
        moved = sum(float(piece.double().square().sum()) for _, pieces in counted for piece in pieces) ** 0.5
        assert moved == pytest.approx(expected, rel=1e-5)


def test_the_norm_does_not_depend_on_the_layout() -> None:
    norms = [pool().run(2, tasks.trained_by, None, parallel)[0][0] for parallel in LAYOUTS]
    assert norms == pytest.approx([norms[0]] * len(LAYOUTS), rel=1e-6)


def test_a_gradient_that_is_not_finite_is_told_and_updates_nothing() -> None:
    model = tasks.spread(nn.Linear(2, 1), tasks.squares)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in model.module.parameters()]
    for bad in (float("nan"), float("inf")):
        model.begin_step(0, 0)
        model.forward_backward([(torch.full((1, 2), bad), torch.zeros(1))], lambda: 1, None)
        model.finish_step()
        assert not torch.isfinite(torch.tensor(model.update(optimizer, 0.1)))
        assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))


def test_gradients_of_zero_have_a_norm_of_zero() -> None:
    model = tasks.spread(nn.Linear(2, 1, bias=False), tasks.squares)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=1.0)
    model.begin_step(0, 0)
    model.forward_backward([(torch.zeros(1, 2), torch.zeros(1))], lambda: 1, None)
    model.finish_step()
    assert model.update(optimizer, 1.0) == 0.0


@pytest.mark.parametrize(
    ("size", "parallel"), [(1, {}), (2, {"pp": 2}), (2, {"tp": 2}), (4, {"pp": 2, "schedule": "zbv", "tp": 2})]
)
def test_an_evaluation_counts_each_target_once_over_the_ranks(size: int, parallel: dict[str, Any]) -> None:
    answers = pool().run(size, tasks.evaluated, parallel)
    alone = pool().run(1, tasks.evaluated, {})[0]
    assert sum(count for _, count in answers) == 3 * 8
    assert sum(total for total, _ in answers) == pytest.approx(alone[0], rel=1e-6)
