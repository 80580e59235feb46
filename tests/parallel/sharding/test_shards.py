from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.sharding import tasks
from tests.ranks import RankFailed, pool

Pieces = list[tuple[str, int, int, torch.Tensor]]


def whole(ranks: list[Pieces], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters put together from the pieces of all ranks; every element has to be there."""
    out = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in like.items()}
    for pieces in ranks:
        for name, start, stop, values in pieces:
            out[name][start:stop] = values
    return {name: flat.view(like[name].shape) for name, flat in out.items()}


EVEN = [[2, 2], [2, 2], [2, 2], [2, 2]]
UNEVEN = [[3, 0, 1], [1, 2, 2], [0, 0, 1], [4, 1, 0]]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_every_stage_trains_as_a_single_process(zero: int, size: int, bucket_bytes: int) -> None:
    if bucket_bytes == 300 and size != 3:
        return
    rows = UNEVEN[:size]
    expected, norms = tasks.reference(rows, steps=4)
    options = {"zero": zero, "bucket_bytes": bucket_bytes}
    answers = pool().run(size, tasks.train, tasks.degrees_for(size, options), options, rows, 4)
    torch.testing.assert_close(whole([pieces for pieces, *_ in answers], expected), expected, rtol=1e-5, atol=1e-6)
    for _, seen, values, _ in answers:
        assert seen == answers[0][1]
        torch.testing.assert_close(seen, norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_trains_as_a_single_process(zero: int) -> None:
    expected, norms = tasks.reference(UNEVEN, steps=3)
    options = {"zero": zero, "bucket_bytes": 400}
    answers = pool().run(4, tasks.train, {"replicate": 2, "shard": 2}, options, UNEVEN, 3)
    for pair in (answers[:2], answers[2:]):
        torch.testing.assert_close(whole([a[0] for a in pair], expected), expected, rtol=1e-5, atol=1e-6)
    for answer in answers:
        assert answer[1] == answers[0][1]
        torch.testing.assert_close(answer[1], norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_same_layout_gives_the_same_bits(zero: int) -> None:
    options = {"zero": zero, "bucket_bytes": 300}
    first, second = (
        pool().run(3, tasks.train, tasks.degrees_for(3, options), options, UNEVEN[:3], 3) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert one[1] == other[1]
        assert all(torch.equal(a[3], b[3]) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_masters_of_16_bit_storage_follow_the_fp32_run(zero: int, storage: torch.dtype) -> None:
    rows = EVEN[:2]
    expected, _ = tasks.reference(rows, steps=3)
    options = {"zero": zero, "storage": storage}
    answers = pool().run(2, tasks.train, tasks.degrees_for(2, options), options, rows, 3)
    masters = whole([answer[0] for answer in answers], expected)
    for name, value in expected.items():
        assert masters[name].dtype == torch.float32
        # AdamW moves each element by about 0.02 a step; the sign of a gradient near zero may differ.
        torch.testing.assert_close(masters[name], value, rtol=0.05, atol=0.05)
        rounded = masters[name].to(storage) if value.dim() >= 2 else masters[name]
        assert all(torch.equal(answer[2][name], rounded) for answer in answers), name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_may_travel_in_bf16(zero: int) -> None:
    rows = EVEN[:2]
    expected, norms = tasks.reference(rows, steps=2)
    options = {"zero": zero, "gradient_dtype": torch.bfloat16}
    answers = pool().run(2, tasks.train, tasks.degrees_for(2, options), options, rows, 2)
    assert answers[0][1] != norms
    torch.testing.assert_close(answers[0][1], norms, rtol=0.01, atol=0)
    torch.testing.assert_close(answers[0][2], answers[1][2], rtol=0, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(answers[0][2][name], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buckets_are_sent_while_backward_runs(zero: int) -> None:
    for first, second in pool().run(2, tasks.launches, {"zero": zero, "bucket_bytes": 1}):
        assert first[0] == 0
        assert second[0] == second[1] >= 4


def branch_reference(passes: list[int], right: bool) -> dict[str, torch.Tensor]:
    model = tasks.Branches()
    for rank, count in enumerate(passes):
        for part in range(count):
            model(tasks.branch_inputs(rank, part), right).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("passes", [[1], [1, 1], [3, 1], [0, 2], [1, 2, 0]])
def test_replicas_may_make_any_number_of_passes(bucket_bytes: int, passes: list[int]) -> None:
    expected = branch_reference(passes, right=True)
    for steps, _ in pool().run(
        len(passes), tasks.branch_gradients, {"bucket_bytes": bucket_bytes}, passes, [True, True]
    ):
        for gradients in steps:
            torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_may_take_part_in_some_steps_only() -> None:
    options = {"allow_unused": True, "bucket_bytes": 1}
    with_it, without = branch_reference([2, 1], True), branch_reference([2, 1], False)
    for steps, unused in pool().run(2, tasks.branch_gradients, options, [2, 1], [False, True, False]):
        assert unused == ["right.weight"]
        torch.testing.assert_close(steps[0], without, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(steps[1], with_it, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(steps[2], without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_parameters_without_gradient_in_the_first_step_are_named_and_refused(zero: int) -> None:
    with pytest.raises(RankFailed) as failure:
        pool().run(2, tasks.branch_gradients, {"zero": zero}, [1, 1], [False])
    for error in failure.value.errors:
        assert error is not None
        assert error.startswith(
            "UserError: parallel.allow_unused=False: parameters got no gradient in the first step: right.weight"
        )


def bytes_of(zero: int, size: int, storage: torch.dtype) -> dict[str, Any]:
    options = {"zero": zero, "storage": storage}
    answers = pool().run(size, tasks.train, tasks.degrees_for(size, options), options, EVEN[:size], 2)
    assert answers[0][3][0] == answers[0][3][1]
    found: dict[str, Any] = answers[0][3][-1]
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_zero_paper(zero: int, storage: torch.dtype) -> None:
    size = 2
    sizes = bytes_of(zero, size, storage)
    model = tasks.Net()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    model_bytes = matrices * storage.itemsize + vectors * 4
    padding = 4 * 2 * 8
    expected = {
        "parameters": model_bytes / (size if zero == 3 else 1),
        "gradients": model_bytes / (size if zero >= 2 else 1),
        "masters": matrices * 4 / (size if zero >= 1 else 1) if storage != torch.float32 else 0,
    }
    for kind, count in expected.items():
        assert count <= sizes[kind] <= count + padding, kind
