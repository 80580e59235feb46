from __future__ import annotations

import pytest
import torch

from dthpc.parallel.sharding.gradients import SMALLEST_VOLLEY, volleys
from tests.parallel.sharding import gradient_tasks, tasks
from tests.ranks import pool


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_was_given_up_leaves_nothing(zero: int) -> None:
    for plain, after in pool().run(2, gradient_tasks.abandon, {"zero": zero, "bucket_bytes": 300}):
        assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weight_gradients_may_come_later_and_outside_autograd(zero: int) -> None:
    model = tasks.Branches()
    for rank in range(2):
        for part in range(2):
            model(tasks.branch_inputs(rank, part)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    answers = pool().run(2, gradient_tasks.deferred, {"zero": zero, "bucket_bytes": 1})
    for step in range(3):
        for name, gradient in expected.items():
            pieces = [answer[0][step][name] for answer in answers if name in answer[0][step]]
            whole = torch.cat([piece.flatten() for piece in pieces]) if zero else pieces[0].flatten()
            torch.testing.assert_close(whole, gradient.flatten(), rtol=1e-5, atol=1e-6)
    for _, sent in answers:
        assert sent[1] == sent[2] > 0
        # Stages 2 and 3 reduce each pass, so the first step's second one knows what to expect.
        assert (sent[0] > 0) == (zero >= 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_may_be_in_two_chunks(zero: int) -> None:
    expected = gradient_tasks.two_chunks(None, {})
    answers = pool().run(2, gradient_tasks.two_chunks, {"zero": zero, "bucket_bytes": 1})
    for step in range(2):
        for number, gradient in enumerate(expected[step]):
            parts = [answer[step][number] for answer in answers]
            whole = torch.where(parts[0].isnan(), parts[1], parts[0])
            torch.testing.assert_close(whole, gradient, rtol=1e-5, atol=1e-6)


def test_volleys_are_large_and_the_last_ones_small() -> None:
    unit = SMALLEST_VOLLEY
    assert volleys([unit] * 20, 8 * unit) == [5, 13, 17, 19, 20]
    assert volleys([unit] * 20, 2 * unit) == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 20]
    assert volleys([1, 1, 1], 1) == [1, 2, 3]
    assert volleys([100 * unit], unit) == [1]
    assert volleys([], unit) == [0]
