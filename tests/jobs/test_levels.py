from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jobs import level_tasks
from tests.parallel.sharding import tasks
from tests.ranks import pool


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-4),
        ({"bucket_bytes": 64}, 1e-4),
        ({"bucket_bytes": 400, "gradient_dtype": torch.bfloat16}, 0.05),
    ],
)
def test_replicas_that_sum_in_levels_train_as_one_process_does(options: dict[str, Any], tolerance: float) -> None:
    rows, hosts = [[2, 1], [1, 3], [2, 2], [1, 1]], ["a", "a", "b", "b"]
    expected, _ = tasks.reference(rows, 3)
    answers = pool().run(4, level_tasks.train, hosts, options, rows, 3)
    for values in answers:
        assert values.keys() == answers[0].keys()
        for name, value in values.items():
            assert torch.equal(value, answers[0][name])
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("hosts", "nodes", "why"),
    [(["a", "a"], 1, "on one node"), (["a", "b"], 2, "one rank each"), (["a", "a", "b"], 2, "different numbers")],
)
def test_why_there_are_no_levels_is_told_to_all(hosts: list[str], nodes: int, why: str) -> None:
    for told in pool().run(len(hosts), level_tasks.without_levels, hosts):
        assert told[0] == nodes
        assert why in told[1]
