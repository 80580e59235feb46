from __future__ import annotations

import pytest

from tests.comm.shared import tasks
from tests.ranks import pool


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("host", "ranks run on 2 hosts"),
        ("memory", "1 MiB of memory are free, too few for 24 MiB to share"),
        ("no socket", "it is not to be"),
        ("no connection", "no connection within the host: rank"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_what_is_amiss_on_one_rank_is_the_reason_on_all(what: str, reason: str, culprit: int) -> None:
    told = pool().run(3, tasks.refusal, what, culprit)
    assert told[0].startswith(reason)
    assert told == [told[0]] * 3


def test_ranks_agree_where_one_gets_no_memory() -> None:
    told = pool().run(2, tasks.no_room, 1)
    assert told[0] == told[1]
    assert told[0].startswith("no memory to share: rank 1 (process ")
    assert told[0].endswith("it is not to be")


def test_nothing_is_left_of_a_room() -> None:
    for during, after, mappings in pool().run(3, tasks.leftovers):
        assert during == 4  # two sockets and two pieces of memory
        assert (after, mappings) == (0, 0)
