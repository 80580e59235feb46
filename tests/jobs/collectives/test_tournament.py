from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dthpc.jobs.collectives.tournament import partner, rounds


@given(st.integers(0, 65))
def test_everybody_meets_everybody_once_in_as_few_rounds_as_there_can_be(players: int) -> None:
    schedule = rounds(players)
    met = [pair for pairs in schedule for pair in pairs]
    assert sorted(met) == sorted(combinations(range(players), 2))
    assert len(schedule) == (0 if players < 2 else players - 1 + players % 2)
    for pairs in schedule:
        named = [player for pair in pairs for player in pair]
        assert len(named) == len(set(named))


@given(st.integers(2, 30))
def test_partners_name_each_other(players: int) -> None:
    for pairs in rounds(players):
        for player in range(players):
            other = partner(pairs, player)
            assert other is None or partner(pairs, other) == player
