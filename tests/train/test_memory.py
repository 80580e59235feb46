from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.parallel.memory import StateBytes
from dthpc.train.memory import bytes_of_element
from tests.ranks import pool
from tests.train import tasks


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"parallel": {"zero": 1}}),
        (2, {"parallel": {"zero": 2}, "precision": {"compute": "bf16", "parameters": "compute"}}),
        (2, {"parallel": {"zero": 3}}),
        (2, {"parallel": {"pp": 2}}),
        (2, {"parallel": {"tp": 2}}),
        (2, {"optim": {"_target_": "torch.optim.SGD", "lr": 0.1, "arguments": {"momentum": 0.9}}}),
        (1, {"optim": {"_target_": "torch.optim.SGD", "lr": 0.1, "arguments": {}}}),
    ],
)
def test_what_a_training_holds_is_what_the_formula_says(tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    train = {"steps": 2, "eval_every": -1}
    for result in pool().run(size, tasks.train_with, str(tmp_path), 0, {**changes, "train": train}):
        record = result.memory
        assert record is not None
        assert record.step == 1
        # Buckets are padded to a multiple of the ranks that share them, and Adam counts the steps of each piece.
        for name in ("parameters", "gradients", "optimizer"):
            measured, expected = getattr(record.measured, name), getattr(record.expected, name)
            slack = 0.02 * expected + 8 * size * 4 + (4 * len(result.pieces) if name == "optimizer" else 0)
            assert abs(measured - expected) <= slack, name


def test_the_formula_for_adamw_in_fp32_is_sixteen_bytes_an_element(tmp_path: Path) -> None:
    (result,) = pool().run(1, tasks.train_with, str(tmp_path), 0, {"train": {"steps": 1, "eval_every": -1}})
    count = sum(values.numel() for _, _, values in result.pieces)
    assert result.memory.expected == StateBytes(4 * count, 4 * count, 8 * count)


@pytest.mark.parametrize(
    ("kind", "arguments", "count"),
    [("AdamW", {}, 8), ("AdamW", {"amsgrad": True}, 12), ("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 4)],
)
def test_bytes_for_an_element_are_those_of_the_optimizers_state(
    kind: str, arguments: dict[str, Any], count: int
) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = getattr(torch.optim, kind)([parameter], **arguments)
    assert bytes_of_element(optimizer) == 0
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    assert bytes_of_element(optimizer) == count
