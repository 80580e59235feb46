from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.sharding import reduction_tasks, tasks
from tests.parallel.sharding.test_shards import EVEN, UNEVEN, whole
from tests.ranks import pool


def degrees(size: int, zero: int) -> dict[str, Any]:
    return {"shard" if zero else "replicate": size, "shared": True}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "bucket_bytes"), [(2, 1), (3, 300), (4, 1 << 20)])
def test_every_stage_trains_as_a_single_process(zero: int, size: int, bucket_bytes: int) -> None:
    expected, norms = tasks.reference(UNEVEN[:size], steps=4)
    options = {"zero": zero, "bucket_bytes": bucket_bytes}
    answers = pool().run(size, tasks.train, degrees(size, zero), options, UNEVEN[:size], 4)
    torch.testing.assert_close(whole([pieces for pieces, *_ in answers], expected), expected, rtol=1e-5, atol=1e-6)
    for _, seen, values, _ in answers:
        assert seen == answers[0][1]
        torch.testing.assert_close(seen, norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_of_shards_train_as_a_single_process(zero: int) -> None:
    expected, norms = tasks.reference(UNEVEN, steps=3)
    layout = {"replicate": 2, "shard": 2, "shared": True}
    answers = pool().run(4, tasks.train, layout, {"zero": zero, "bucket_bytes": 400}, UNEVEN, 3)
    for pair in (answers[:2], answers[2:]):
        torch.testing.assert_close(whole([a[0] for a in pair], expected), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(answers[0][1], norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks_get_the_bits_that_they_get_over_the_wire(zero: int) -> None:
    options = {"zero": zero, "bucket_bytes": 300}
    memory, wire = (
        pool().run(2, tasks.train, {**degrees(2, zero), "shared": shared}, options, EVEN[:2], 3)
        for shared in (True, False)
    )
    model = {name: p.detach() for name, p in tasks.Net().named_parameters()}
    one, other = (whole([answer[0] for answer in answers], model) for answers in (memory, wire))
    assert all(torch.equal(one[name], other[name]) for name in model)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_same_layout_gives_the_same_bits(zero: int) -> None:
    options = {"zero": zero, "bucket_bytes": 300}
    first, second = (pool().run(3, tasks.train, degrees(3, zero), options, UNEVEN[:3], 3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one[1] == other[1]
        assert all(torch.equal(a[3], b[3]) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["storage", "gradient_dtype"])
def test_16_bits_follow_the_fp32_run(zero: int, form: str) -> None:
    expected, _ = tasks.reference(EVEN[:2], steps=2)
    options = {"zero": zero, form: torch.bfloat16}
    answers = pool().run(2, tasks.train, degrees(2, zero), options, EVEN[:2], 2)
    for name, value in expected.items():
        assert torch.equal(answers[0][2][name], answers[1][2][name])
        torch.testing.assert_close(answers[0][2][name].float(), value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_that_ranks_hold_once_among_them_count_once(zero: int) -> None:
    options = {"zero": zero}
    *_, sizes = pool().run(2, tasks.train, degrees(2, zero), options, EVEN[:2], 2)[0][3]
    model_bytes = 4 * sum(p.numel() for p in tasks.Net().parameters())
    assert 0 <= sizes["parameters"] - model_bytes / (2 if zero else 1) <= 64
    assert 0 <= sizes["gradients"] - model_bytes / (2 if zero >= 2 else 1) <= 64


@pytest.mark.parametrize("axis", ["pp", "tp"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_copies_on_other_ranks_get_the_sum(axis: str, zero: int) -> None:
    layout = {**degrees(2, zero), axis: 2}
    answers = pool().run(4, reduction_tasks.tied_and_partial, layout, {"zero": zero, "bucket_bytes": 64}, axis)
    for _, norm, plain in answers:
        assert norm == answers[0][1]
        torch.testing.assert_close(norm, plain, rtol=1e-5, atol=0)


def test_values_change_only_while_nobody_reads_them() -> None:
    assert pool().run(2, tasks.late_reader) == [True, True]
