from __future__ import annotations

import pytest
import torch

from tests.comm.collective_tasks import summands
from tests.comm.shared import tasks
from tests.ranks import pool


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float32), (700_001, torch.float32), (33, torch.bfloat16), (60_000, torch.float16), (40, torch.int64)],
)
def test_all_ranks_get_one_sum_rounded_once(size: int, count: int, dtype: torch.dtype, in_place: bool) -> None:
    answers = pool().run(size, tasks.sums, size, count, dtype, in_place)
    exact = sum(summands(rank, size * count, 0, dtype).double() for rank in range(size))
    assert isinstance(exact, torch.Tensor)
    for rank, (whole, share) in enumerate(answers):
        assert torch.equal(whole, answers[0][0])
        for found, true in ((whole, exact), (share, exact.chunk(size)[rank])):
            if dtype.is_floating_point:
                error = (found.double() - true).abs()
                assert (error <= torch.finfo(dtype).eps * 0.51 * true.abs() + 2e-6).all()
            else:
                assert torch.equal(found.double(), true)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_have_the_bits_that_they_have_over_the_wire(size: int, dtype: torch.dtype) -> None:
    assert pool().run(size, tasks.both_ways, size, 5000, dtype) == [[True, True]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_wait_in_any_order_for_more_than_the_window_holds(size: int) -> None:
    for answers in pool().run(size, tasks.waits_in_any_order, size, 12):
        for call, found in enumerate(answers):
            total = torch.stack([summands(rank, 1000, call) for rank in range(size)]).sum(0)
            whole = torch.cat([summands(rank, 1000, call)[:100] for rank in range(size)])
            torch.testing.assert_close(found, torch.cat([total, whole]), rtol=1e-5, atol=1e-6)


def test_a_rank_may_ask_instead_of_waiting() -> None:
    (before, first), (_, second) = pool().run(2, tasks.asks)
    assert not before
    assert second
    assert first
