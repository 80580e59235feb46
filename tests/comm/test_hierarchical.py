from __future__ import annotations

import pytest
import torch

from dthpc.comm.hierarchical import is_quicker
from tests.comm import hierarchical_tasks as tasks
from tests.ranks import pool

SPREADS = {
    "two nodes of two": ["a", "a", "b", "b"],
    "in turns": ["a", "b", "a", "b"],
    "three nodes of two": ["a", "a", "b", "b", "c", "c"],
    "two nodes of three": ["a", "a", "a", "b", "b", "b"],
}


@pytest.mark.parametrize("hosts", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_right_and_has_the_same_bits_on_all_ranks(hosts: list[str], dtype: torch.dtype) -> None:
    counts = [1, 2, 5, 6, 1000, 6001, 30000]
    answers = pool().run(len(hosts), tasks.reduce, hosts, counts, dtype)
    for number, count in enumerate(counts):
        exact = torch.stack([tasks.summands(rank, count, dtype).double() for rank in range(len(hosts))])
        bound = torch.finfo(dtype).eps * exact.abs().sum(0) * 2 + 1e-12
        for answer in answers:
            assert answer[number].dtype == dtype
            assert ((answer[number].double() - exact.sum(0)).abs() <= bound).all()
            assert torch.equal(answer[number], answers[0][number])


def test_a_sum_has_the_same_bits_each_time() -> None:
    hosts = SPREADS["two nodes of two"]
    first, second = (pool().run(4, tasks.reduce, hosts, [5, 9001], torch.float32) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_all_ranks_hear_the_same_times_of_both_ways() -> None:
    answers = pool().run(4, tasks.choose, SPREADS["two nodes of two"])
    assert all(answer == answers[0] for answer in answers)
    assert [size for size, _, _ in answers[0]] == [400, 4000]
    assert all(0 < each < 60 for _, flat, hierarchical in answers[0] for each in (flat, hierarchical))


def test_three_steps_are_taken_where_they_are_quicker_for_large_tensors_and_on_the_whole() -> None:
    assert is_quicker([(1, 1.0, 1.2), (9, 2.0, 1.0)])
    assert not is_quicker([(1, 1.0, 0.1), (9, 2.0, 2.1)])
    assert not is_quicker([(1, 1.0, 9.0), (9, 2.0, 1.9)])
    assert not is_quicker([])
