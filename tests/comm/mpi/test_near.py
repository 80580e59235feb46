from __future__ import annotations

import pytest
import torch

from tests.comm.collective_tasks import summands
from tests.comm.mpi import near_tasks
from tests.mpi_ranks import pool


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_results_are_those_of_mpis_own_calls(size: int, dtype: torch.dtype) -> None:
    answers = pool().run(size, near_tasks.both_ways, 700_001, dtype)
    for through, without in ((answer[:3], answer[3:]) for answer in answers):
        for found, expected in zip(through, without, strict=True):
            if dtype is torch.int64 or size == 2:
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
    for found in zip(*(answer[:2] for answer in answers), strict=True):
        assert all(torch.equal(one, found[0]) for one in found)


def test_sums_of_large_tensors_are_taken_and_nothing_else() -> None:
    assert pool().run(2, near_tasks.taken)[0] == [True, False, False, True, True]
    # Of three, the order in which they are rounded would be another.
    assert pool().run(3, near_tasks.taken)[0] == [True, False, False, True, False]


@pytest.mark.parametrize("size", [2, 4])
def test_many_may_be_under_way(size: int) -> None:
    for tensors in pool().run(size, near_tasks.asynchronously, 9):
        for call, tensor in enumerate(tensors):
            total = torch.stack([summands(rank, 300_000, call) for rank in range(size)]).sum(0)
            torch.testing.assert_close(tensor, total, rtol=1e-5, atol=1e-5)


def test_tensors_of_different_sizes_are_an_error_on_all_ranks() -> None:
    answers = pool().run(2, near_tasks.mismatch)
    for first, second in answers:
        assert "operations or sizes differ" in first
        assert "all_reduce of 1600000 bytes" in first
        assert "all_reduce of 3200000 bytes" in first
        assert "can't be used any more" in second


def test_a_rank_that_does_not_come_is_named() -> None:
    (said,), _ = pool().run(2, near_tasks.late)
    assert "Did not call it: rank 1" in said
