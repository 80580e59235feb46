"""Gradients that need more than a sum over data-parallel ranks, or come by other ways than one backward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dthpc.errors import UserError
from dthpc.parallel.layout import Layout
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding import tasks
from tests.ranks import pool


@pytest.mark.parametrize("axis", ["pp", "tp"])
@pytest.mark.parametrize(
    ("degrees", "zero"), [({}, 0), ({"replicate": 2}, 0), ({"shard": 2}, 1), ({"shard": 2}, 2), ({"shard": 2}, 3)]
)
def test_copies_on_other_ranks_get_the_sum_and_count_once(axis: str, degrees: dict[str, int], zero: int) -> None:
    degrees = {**degrees, axis: 2}
    size = math.prod(degrees.values())
    options = {"zero": zero, "bucket_bytes": 64}
    expected = tasks.pipe_reference(Layout(**degrees), size, axis)
    answers = pool().run(size, tasks.tied_and_partial, degrees, options, axis)
    found = set()
    for pieces, norm, plain in answers:
        assert norm == answers[0][1]
        torch.testing.assert_close(norm, plain, rtol=1e-5, atol=0)
        for key, gradient in pieces.items():
            name, start = key.split(":")
            found.add(name)
            part = expected[name].flatten()[int(start) : int(start) + gradient.numel()]
            torch.testing.assert_close(gradient.flatten(), part, rtol=1e-5, atol=1e-6)
    assert found == set(expected)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_was_given_up_leaves_nothing(zero: int) -> None:
    for plain, after in pool().run(2, tasks.abandon, {"zero": zero, "bucket_bytes": 300}):
        assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weight_gradients_may_come_later_and_outside_autograd(zero: int) -> None:
    model = tasks.Branches()
    for rank in range(2):
        for part in range(2):
            model(tasks.branch_inputs(rank, part)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    answers = pool().run(2, tasks.deferred, {"zero": zero, "bucket_bytes": 1})
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
    expected = tasks.two_chunks(None, {})
    answers = pool().run(2, tasks.two_chunks, {"zero": zero, "bucket_bytes": 1})
    for step in range(2):
        for number, gradient in enumerate(expected[step]):
            parts = [answer[step][number] for answer in answers]
            whole = torch.where(parts[0].isnan(), parts[1], parts[0])
            torch.testing.assert_close(whole, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_reaches_the_norm_of_all(zero: int) -> None:
    assert not any(math.isfinite(norm) for norm in pool().run(2, tasks.overflow, zero))


def test_powersgd_approximates_and_repeats_itself_after_a_break() -> None:
    (one, errors), (other, _) = pool().run(2, tasks.powersgd, 2, 6, None)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert max(errors[:2]) < 1e-6
    assert min(errors[2:]) > 1e-4
    for resume_at in (1, 4):
        (again, _), _ = pool().run(2, tasks.powersgd, 2, 6, resume_at)
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    (_, closer), _ = pool().run(2, tasks.powersgd, 6, 6, None)
    assert sum(closer[2:]) < sum(errors[2:])


def test_powersgd_refuses_zero() -> None:
    model: Any = tasks.Branches()
    with pytest.raises(UserError, match=r"parallel\.gradients\.powersgd_rank=2: "):
        Shards([model], whole_parts([model]), tasks.mesh_of(), ShardOptions(zero=1, powersgd_rank=2))
