from __future__ import annotations

import pytest

from tests.comm.shared import tasks
from tests.ranks import RankFailed, pool


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_is_killed_is_named_by_all_others(size: int, victim: int) -> None:
    with pytest.raises(RankFailed) as failure:
        pool().run(size, tasks.dies, victim)
    for rank, error in enumerate(failure.value.errors):
        assert error is not None
        if rank != victim:
            assert error.startswith(f"RankLost: rank {victim} (process ")
            assert "has ended" in error.splitlines()[0]


def test_a_rank_is_gone_even_if_a_child_of_its_lives() -> None:
    with pytest.raises(RankFailed) as failure:
        pool().run(2, tasks.children)
    assert str(failure.value.errors[0]).startswith("RankLost: rank 1 (process ")


def test_a_rank_that_leaves_is_an_error_only_for_who_needs_it() -> None:
    told, _ = pool().run(2, tasks.leaves)
    assert told.startswith("rank 1 (process ")
    assert told.endswith("has ended, and others wait for it in a collective")


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_is_named_in_time(size: int) -> None:
    *told, last = pool().run(size, tasks.keeps_waiting)
    assert last == ""
    for line in told:
        assert line.startswith(f"rank {size - 1} (process ")
        assert line.endswith("did not take part in a collective within 0.3 s")
