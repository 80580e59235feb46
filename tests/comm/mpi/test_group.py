from __future__ import annotations

import pytest
import torch

from tests.comm.mpi import tasks
from tests.mpi_ranks import pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
def test_short_floats_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype, size: int) -> None:
    for count in (12, 40_000):
        answers = pool().run(size, tasks.short_floats, count, dtype)
        exact = torch.zeros(count)
        for rank in range(size):
            exact += tasks.summand(rank, count, dtype)
        for rank, (total, average, share, rooted) in enumerate(answers):
            assert torch.equal(total, exact.to(dtype))
            assert torch.equal(average, (exact / size).to(dtype))
            assert torch.equal(share, exact.to(dtype).chunk(size)[rank])
            assert torch.equal(rooted, exact.to(dtype) if rank == 0 else tasks.summand(rank, count, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_not_a_number_of_one_rank_reaches_all(dtype: torch.dtype) -> None:
    for count in (3, 30_000):
        for least, most in pool().run(3, tasks.not_a_number, dtype, count):
            for found, other in ((least, 0.0), (most, 2.0)):
                assert found[1].isnan()
                assert found[0] == found[2] == other


def test_operands_are_multiplied_first() -> None:
    assert all(answer.eq(3).all() for answer in pool().run(3, tasks.premultiplied))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_all_ranks_get_the_same_bits(dtype: torch.dtype, op: str) -> None:
    first, *others = pool().run(4, tasks.same_bits, dtype, op)
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_done_to_parameters_is_not_recorded(size: int) -> None:
    assert pool().run(size, tasks.parameters) == [[(float(size), True, False)] * 8] * size


def test_messages_of_more_than_two_gibibytes() -> None:
    assert pool().run(2, tasks.huge, 2**31 + 5) == [[True] * 3] * 2


def test_libraries_that_count_by_int_get_pieces() -> None:
    pool().run(3, tasks.in_pieces)


def test_communicators_are_freed() -> None:
    # MPICH has about two thousand at once.
    answers = pool().run(3, tasks.groups_again, 2300)
    assert answers[0] == answers[1] == [3.0] * 2300


def test_a_group_may_be_split_in_any_order() -> None:
    answers = pool().run(4, tasks.split)
    assert [answer[:3] for answer in answers] == [
        [0, 2, "mpi4py"],
        [1, 2, "mpi4py"],
        [1, 2, "mpi4py"],
        [0, 2, "mpi4py"],
    ]
    assert [answer[3:] for answer in answers] == [["half", 1.0], ["half", 1.0], ["half", 5.0], ["half", 5.0]]


def test_destroying_a_group_completes_what_is_under_way() -> None:
    assert pool().run(3, tasks.pending_at_the_end) == [3.0] * 3


def test_a_callback_may_call_and_wait() -> None:
    assert pool().run(3, tasks.futures) == [[6.0, True, True]] * 3


def test_threads_groups_and_messages_at_once() -> None:
    assert pool().run(3, tasks.soak, 25) == [[]] * 3


def test_groups_do_not_wait_for_each_other() -> None:
    assert pool().run(4, tasks.crossed_groups) == [8.0] * 4
