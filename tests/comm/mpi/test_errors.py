from __future__ import annotations

import re

import pytest

from tests.comm.mpi import tasks
from tests.mpi_ranks import pool
from tests.ranks import RankFailed


def test_a_late_rank_is_named_and_the_group_says_that_it_is_unusable() -> None:
    answers = pool().run(3, tasks.late_rank, 1)
    assert answers[1] == []
    for rank in (0, 2):
        first, second = answers[rank]
        assert re.search(r"operation 1, all_reduce\(float32 \[5\], SUM\) of group \S+ \(ranks 0-2\)", first)
        assert f"on rank {rank} did not end within 1." in first
        assert "Did not call it: rank 1. Waited in it: ranks 0, 2." in first
        assert "can't be used any more: its all_reduce did not end in time" in second


def test_a_future_tells_a_time_out_too_and_what_was_not_started_fails_with_it() -> None:
    answers = pool().run(3, tasks.late_asynchronously, 2)
    for rank in (0, 1):
        first, second = answers[rank]
        assert "Did not call it: rank 2" in first
        assert "all_reduce(float32 [3], SUM)" in second
        assert "was not started: its all_reduce did not end in time" in second


def test_what_waits_for_an_operation_that_fails_fails_at_once() -> None:
    for first, second in pool().run(3, tasks.queued_behind_an_error):
        assert "operations or sizes differ" in first
        assert "was not started: its all_reduce_coalesced failed" in second


def test_a_silent_peer_is_named() -> None:
    ((said,), _) = pool().run(2, tasks.silent_peer)
    assert "recv(float32 [3], from rank 1, tag 9)" in said
    assert "on rank 0 did not end within 0.6 s" in said


def test_a_time_out_tells_who_called_what() -> None:
    answers = pool().run(3, tasks.other_order)
    assert "Rank 1 called reduce_scatter_single(float32 [6], SUM) instead." in answers[2][0]
    assert "Did not call it: rank 0." in answers[2][0]


@pytest.mark.parametrize(("everyone", "named"), [(False, "rank 1"), (True, "rank 1, 3")])
def test_a_monitored_barrier_names_who_did_not_come(everyone: bool, named: str) -> None:
    answers = pool().run(4, tasks.monitored, [1, 3], everyone)
    for rank in (0, 2):
        assert re.search(rf"after 0.5 s had not come: {named}$", answers[rank][0])


def test_a_group_that_a_member_does_not_join_is_not_waited_for() -> None:
    (said,), *_ = pool().run(3, tasks.absent_member)
    assert "did not come: rank 2" in said


def test_messages_of_other_sizes_are_errors() -> None:
    _, (less, more) = pool().run(2, tasks.too_much)
    assert "12 bytes came from rank 0 of the group, and 20 were to be received" in less
    assert re.search(r"recv\(float32 \[5\], from rank 0, tag 0\) of group .* on rank 1 failed", more)


def test_the_checked_mode_tells_who_called_what() -> None:
    for said in pool().run(3, tasks.mismatches):
        shape, dtype, reduction, operation, root = said
        assert "ranks 0, 2 all_reduce(float32 [3], SUM); rank 1 all_reduce(float32 [4], SUM)" in shape
        assert "rank 1 all_reduce(float64 [3], SUM)" in dtype
        assert "rank 1 all_reduce(float32 [3], MAX)" in reduction
        assert "ranks 0, 2 broadcast(float32 [3], from rank 0); rank 1 barrier()" in operation
        assert "rank 1 broadcast(float32 [3], from rank 1)" in root


def test_calls_without_meaning_are_refused() -> None:
    for bits, order, gathered, splits, tag in pool().run(2, tasks.wrong_arguments):
        assert "BAND works on bits of integers" in bits
        assert "complex numbers have no order" in order
        assert "output has 6 elements, 2 inputs of 4 are gathered" in gathered
        assert "3, is not divisible by the 2 ranks" in splits
        assert "is outside 0" in tag


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankFailed, match="its process died"):
        pool().run(3, tasks.die, 1)
    assert pool().run(2, tasks.pending_at_the_end) == [2.0] * 2
