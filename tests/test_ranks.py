from collections.abc import Iterator

import pytest

from tests import ranks, ranks_tasks
from tests.ranks import RankFailed, RankPool


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.5)
    own = RankPool()
    yield own
    own.close()


def test_ranks_form_a_group_of_any_size_and_stay(fresh: RankPool) -> None:
    first = fresh.run(2, ranks_tasks.process_of)
    assert fresh.run(3, ranks_tasks.ranks_of) == [[0, 1, 2]] * 3
    assert fresh.run(3, ranks_tasks.process_of)[:2] == first


def test_a_failure_is_told_first_and_the_pool_works_again_at_once(fresh: RankPool) -> None:
    before = fresh.run(4, ranks_tasks.process_of)
    with pytest.raises(RankFailed) as failure:
        fresh.run(4, ranks_tasks.fail, 2, 3)
    assert str(failure.value).startswith("rank 2: ValueError: so much for that")
    errors = failure.value.errors
    assert errors[3] is not None
    assert "did not end within 0.5 s" in errors[3]
    assert fresh.run(4, ranks_tasks.ranks_of) == [[0, 1, 2, 3]] * 4
    after = fresh.run(4, ranks_tasks.process_of)
    assert after[2] == before[2], "a rank that only raised an error goes on"
    assert after[3] != before[3], "one that hung is replaced"


def test_a_rank_that_dies_is_replaced(fresh: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: its process died \(exit code 7\)"):
        fresh.run(2, ranks_tasks.die, 1)
    assert fresh.run(2, ranks_tasks.ranks_of) == [[0, 1]] * 2
