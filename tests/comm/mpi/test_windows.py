from __future__ import annotations

from tests.comm.mpi import near_tasks
from tests.mpi_ranks import pool


def test_a_group_takes_over_the_window_of_one_that_was_destroyed() -> None:
    for before, after in pool().run(3, near_tasks.windows_again, 20):
        assert after <= before + 2


def test_where_memory_is_short_mpi_does_it_alone() -> None:
    assert pool().run(3, near_tasks.little_memory) == [False, False, False]


def test_a_rank_may_wait_in_memory_and_not_for_ever() -> None:
    ((said,), _) = pool().run(2, near_tasks.waiting)
    assert "did not take part in a collective within 0.3 s" in said
