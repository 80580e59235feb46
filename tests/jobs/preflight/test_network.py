"""All-reduces of pairs and of all, and clocks, between real ranks."""

from __future__ import annotations

from tests.jobs.preflight import tasks
from tests.ranks import pool


def test_each_node_meets_each_other_rank_by_rank() -> None:
    found = pool().run(6, tasks.measured, 2, 15)
    assert [result["nodes"].ranks for result in found] == [[[0, 1], [2, 3], [4, 5]]] * 6
    assert [result["nodes"].leads for result in found] == [True, False] * 3
    for rank, result in enumerate(found):
        assert set(result["met"]) == {"n0", "n1", "n2"} - {f"n{rank // 2}"}
        assert all(rate > 0 for rate in result["met"].values())
        # One machine has one clock.
        assert abs(result["clock"]) < 0.5
        assert result["rate"] > 0


def test_no_more_partners_than_asked() -> None:
    found = pool().run(4, tasks.measured, 1, 1)
    assert [len(result["met"]) for result in found] == [1, 1, 1, 1]
