from __future__ import annotations

import pytest
import torch

from dthpc.comm.collectives import BufferPool
from tests.comm import collective_tasks as tasks
from tests.ranks import pool


@pytest.mark.parametrize("size", range(1, 9))
def test_collectives_of_all_kinds_may_be_under_way_at_once(size: int) -> None:
    answers = pool().run(size, tasks.mixture, size, 7)
    for rank, results in enumerate(answers):
        for call in range(7):
            share, total, whole, theirs = results[4 * call : 4 * call + 4]
            count = share.numel()
            expected = sum(tasks.summands(other, size * count, call).double() for other in range(size))
            assert isinstance(expected, torch.Tensor)
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(share.double(), expected.chunk(size)[rank], rtol=1e-5, atol=1e-6)
            assert torch.equal(whole, torch.cat([tasks.summands(other, count, call) for other in range(size)]))
            assert theirs.eq(rank ^ 1 if size % 2 == 0 else rank).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather_concatenates(size: int, in_place: bool) -> None:
    for outs in pool().run(size, tasks.gather, size, 5, in_place, 3):
        for call, out in enumerate(outs):
            assert torch.equal(out, torch.cat([tasks.summands(rank, 5, call) for rank in range(size)]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "wide", "add", "in_place"),
    [
        (torch.float32, torch.float32, False, True),
        (torch.float32, torch.float32, True, False),
        (torch.bfloat16, torch.bfloat16, False, False),
        (torch.bfloat16, torch.bfloat16, False, True),
        (torch.bfloat16, torch.bfloat16, True, False),
        (torch.bfloat16, torch.float32, False, False),
        (torch.float16, torch.float32, True, False),
    ],
)
def test_reduce_scatter_sums_in_fp32_and_rounds_once(
    size: int, dtype: torch.dtype, wide: torch.dtype, add: bool, in_place: bool
) -> None:
    answers = pool().run(size, tasks.scatter, size, 9, dtype, wide, add, in_place, 2)
    for rank, outs in enumerate(answers):
        for call, out in enumerate(outs):
            exact = sum(tasks.summands(other, size * 9, call, dtype).double() for other in range(size))
            assert isinstance(exact, torch.Tensor)
            mine = exact.chunk(size)[rank] + add
            assert out.dtype == wide
            assert ((out.double() - mine).abs() <= torch.finfo(wide).eps * 0.5 * mine.abs() + 1e-6).all()


def test_a_sum_has_the_same_bits_each_time() -> None:
    first, second = (
        pool().run(4, tasks.scatter, 4, 50, torch.float32, torch.float32, False, False, 3) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_buffer_that_was_given_back_is_lent_again() -> None:
    rooms = BufferPool()
    one = rooms.take(10, torch.float32, torch.device("cpu"))
    other = rooms.take(10, torch.float32, torch.device("cpu"))
    assert one.data_ptr() != other.data_ptr()
    rooms.give(one)
    assert rooms.nbytes == 80
    assert rooms.take(10, torch.bfloat16, torch.device("cpu")).data_ptr() != one.data_ptr()
    assert rooms.take(10, torch.float32, torch.device("cpu")) is one
    rooms.give(one)
    rooms.clear()
    assert rooms.nbytes == 60
