from __future__ import annotations

import pytest
import torch

from dthpc.parallel.buckets import GradientBuckets
from tests.parallel import tasks
from tests.ranks import pool


def reference(passes: list[int], right: bool) -> list[torch.Tensor]:
    """Sum of the gradients of all passes of all ranks, by plain autograd."""
    model = tasks.Branches()
    for rank, count in enumerate(passes):
        for part in range(count):
            model(tasks.inputs(rank, part), right).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("passes", [[1, 1], [3, 1], [0, 2], [0, 0], [1, 2, 0]])
def test_gradients_are_the_sum_over_ranks_and_passes_in_every_step(bucket_bytes: int, passes: list[int]) -> None:
    expected = reference(passes, right=True)
    for steps in pool().run(len(passes), tasks.bucket_gradients, bucket_bytes, passes, True):
        for gradients in steps:
            torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_part_in_a_step_counts_as_zero() -> None:
    expected = reference([1, 1], right=False)
    for steps in pool().run(2, tasks.bucket_gradients, 64, [1, 1], False):
        torch.testing.assert_close(steps[-1], expected, rtol=1e-5, atol=1e-6)


def test_buckets_are_sent_while_backward_runs() -> None:
    for started, count in pool().run(2, tasks.launches_during_backward, 1):
        assert count == 5
        assert started == count


def test_a_single_process_needs_no_group_and_keeps_its_gradients() -> None:
    model = tasks.Branches()
    buckets = GradientBuckets(model.parameters(), None)
    with buckets.last_backward():
        model(tasks.inputs(0, 0)).backward()
    buckets.finish()
    torch.testing.assert_close([p.grad for p in model.parameters()], reference([1], right=True))


def test_gradients_are_views_of_the_flat_buffers_even_after_they_were_dropped() -> None:
    model = tasks.Branches()
    buckets = GradientBuckets(model.parameters(), None, bucket_bytes=100)
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad(set_to_none=True)
    buckets.zero()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(2.0)
    count = sum(p.numel() for p in model.parameters())
    assert sum(flat.numel() for flat in buckets.flat) == count
    torch.testing.assert_close(buckets.norm().item(), 2.0 * count**0.5)
    buckets.scale(0.5)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def test_frozen_parameters_take_no_room() -> None:
    model = tasks.Branches()
    model.left.requires_grad_(False)
    buckets = GradientBuckets(model.parameters(), None)
    assert sum(flat.numel() for flat in buckets.flat) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.left.weight.grad is None
