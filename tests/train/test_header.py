from __future__ import annotations

import pytest
import torch.distributed as dist

from dthpc.train.header import Agreed, Header
from tests.ranks import pool


def exchange(rank: int, rows: list[list[dict[str, object]]]) -> list[Agreed]:
    """What this rank receives when each rank sends its rows, one after the other."""
    header = Header(dist.group.WORLD)
    received = []
    for row in rows:
        header.send(**row[rank])  # type: ignore[arg-type]
        received.append(header.receive())
    return received


def test_all_ranks_receive_the_same_sums() -> None:
    rows = [
        [{"targets": 5, "loss": 1.5, "data_wait": 0.2}, {"targets": 3, "loss": 2.0}],
        [{"targets": 1}, {"stop": "SIGTERM"}],
        [{"stop": "SIGUSR2"}, {"stop": "SIGUSR2"}],
        [{"stop": "SIGINT"}, {"stop": "SIGTERM"}],
    ]
    first, second = pool().run(2, exchange, rows)
    assert first == second
    assert first[0] == Agreed(8, 3.5, pytest.approx(0.1), None)
    assert [agreed.stop for agreed in first[1:]] == ["SIGTERM", "SIGUSR2", "several signals"]


def test_counts_beyond_the_reach_of_fp32_are_exact() -> None:
    count = 2**40 + 1
    ((agreed,), _) = pool().run(2, exchange, [[{"targets": count}, {"targets": count}]])
    assert agreed.targets == 2 * count


def test_one_process_needs_no_group() -> None:
    header = Header(None)
    header.send(targets=4, loss=0.5, data_wait=0.1, stop="SIGTERM")
    assert header.receive() == Agreed(4, 0.5, 0.1, "SIGTERM")
