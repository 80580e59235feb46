from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.parallel.memory import FP32, MIXED, StateBytes, expected, model_state_bytes, storage_bytes
from dthpc.parallel.parts import Part
from tests.parallel import memory_tasks as tasks
from tests.ranks import pool


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_formula_gives_the_numbers_of_the_papers_figure(zero: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 ranks, K = 12 (Rajbhandari et al. 2020, figure 1)."""
    assert round(model_state_bytes(7_500_000_000, MIXED, zero, 64).total / 1e9, 1) == gigabytes


def test_vectors_stay_in_fp32_and_only_a_ranks_part_counts() -> None:
    parts = [Part("w", (6, 4), dim=0, start=2, size=2), Part("b", (6,))]
    assert expected(parts, zero=1, shard=2, matrix=MIXED) == StateBytes(8 * 2 + 6 * 4, 8 * 2 + 6 * 4, 8 * 6 + 6 * 4)
    assert expected(parts, matrix=FP32).total == 14 * 16


def test_a_storage_that_tensors_share_counts_once_and_as_a_whole() -> None:
    flat = torch.zeros(10)
    other = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    assert storage_bytes([flat[2:4], flat[5:].view(5, 1), other, other.detach(), 7]) == 46


def assert_close(measured: dict[str, float], expected: dict[str, float], padding: int) -> None:
    for kind, each in expected.items():
        assert measured[kind] == pytest.approx(each, rel=0.02, abs=12 * padding), kind


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_live_storages_are_as_the_formula_says(size: int, zero: int, storage: torch.dtype) -> None:
    degrees = {"shard": size, "zero": zero} if zero else {"replicate": size}
    for rank in pool().run(size, tasks.after_steps, degrees, storage):
        assert rank["padding"] < 64
        assert_close(rank["measured"], rank["expected"], rank["padding"])


@pytest.mark.parametrize("zero", [1, 3])
def test_tensor_parallel_parts_and_replicas_are_in_the_formula(zero: int) -> None:
    """Hybrid: two ranks share a matrix, and two of each half's four replicas share their states."""
    degrees = {"replicate": 2, "shard": 2, "tp": 2, "zero": zero}
    for rank in pool().run(8, tasks.after_steps, degrees):
        assert_close(rank["measured"], rank["expected"], rank["padding"])
