from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.tensor import tasks
from tests.ranks import pool


def whole(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x.float(), targets, reduction="sum", ignore_index=-100)
    (loss * scale).backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def targets_of(rows: int, vocabulary: int) -> Tensor:
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    targets[::5] = -100
    return targets


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocabulary", [37, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_those_of_the_whole_logits(tp: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, targets = tasks.random(23, vocabulary, dtype=dtype) * 5, targets_of(23, vocabulary)
    loss, gradient = whole(logits, targets, 0.25)
    answers = pool().run(tp, tasks.cross_entropy, tp, logits, targets, 0.25)
    for value, _ in answers:
        assert torch.equal(value, answers[0][0])
        torch.testing.assert_close(value, loss, rtol=1e-6, atol=0.0)
    rtol = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(torch.cat([grad for _, grad in answers], 1), gradient, rtol=rtol, atol=1e-7)


def test_large_and_infinite_logits_are_no_problem() -> None:
    logits, targets = tasks.random(6, 8) * 1e4, torch.tensor([0, 1, 2, 3, 4, 7])
    logits[:, 5:7] = float("-inf")
    logits[2, 4:] = float("-inf")
    logits[4, :4] = float("-inf")
    loss, gradient = whole(logits, targets, 1.0)
    answers = pool().run(2, tasks.cross_entropy, 2, logits, targets, 1.0)
    torch.testing.assert_close(answers[0][0], loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(torch.cat([grad for _, grad in answers], 1), gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_targets_give_zero(rows: int) -> None:
    targets = torch.full((rows,), -100)
    for value, gradient in pool().run(2, tasks.cross_entropy, 2, tasks.random(rows, 9), targets, 1.0):
        assert value == 0.0
        assert not gradient.any()


@pytest.mark.parametrize("bad", [9, -1])
def test_a_target_outside_the_vocabulary_is_told(bad: int) -> None:
    for said in pool().run(2, tasks.cross_entropy_error, 2, tasks.random(2, 9), torch.tensor([1, bad])):
        assert said == f"target {bad} is out of bounds: the vocabulary has 9 tokens"
