from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parallel.tensor import tasks
from tests.ranks import pool

RANKS = [2, 4]


def per_rank(tp: int, *shape: int, seed: int = 0) -> list[Tensor]:
    return [tasks.random(*shape, seed=10 * seed + rank) for rank in range(tp)]


@pytest.mark.parametrize("tp", RANKS)
def test_reduce_adds_and_hands_gradients_on(tp: int) -> None:
    inputs, weights = per_rank(tp, 2, 8, 3), per_rank(tp, 2, 8, 3, seed=1)
    for rank, (out, grad) in enumerate(pool().run(tp, tasks.run_function, tp, "reduce", inputs, weights)):
        torch.testing.assert_close(out, torch.stack(inputs).sum(0))
        assert torch.equal(grad, weights[rank])


@pytest.mark.parametrize("tp", RANKS)
def test_reduce_scatter_adds_and_gathers_gradients(tp: int) -> None:
    inputs, weights = per_rank(tp, 2, 8, 3), per_rank(tp, 2, 8 // tp, 3, seed=1)
    for rank, (out, grad) in enumerate(pool().run(tp, tasks.run_function, tp, "reduce_scatter", inputs, weights)):
        torch.testing.assert_close(out, torch.stack(inputs).sum(0).chunk(tp, 1)[rank])
        assert torch.equal(grad, torch.cat(weights, 1))


@pytest.mark.parametrize("tp", RANKS)
def test_split_keeps_a_part_and_gathers_gradients(tp: int) -> None:
    x, weights = tasks.random(2, 8, 3), per_rank(tp, 2, 8 // tp, 3, seed=1)
    for rank, (out, grad) in enumerate(pool().run(tp, tasks.run_function, tp, "split", [x] * tp, weights)):
        assert torch.equal(out, x.chunk(tp, 1)[rank])
        assert torch.equal(grad, torch.cat(weights, 1))


@pytest.mark.parametrize("tp", RANKS)
def test_gather_whole_puts_parts_together_and_keeps_its_part_of_gradients(tp: int) -> None:
    inputs, weight = per_rank(tp, 2, 3, 3), tasks.random(2, 3 * tp, 3, seed=9)
    for rank, (out, grad) in enumerate(pool().run(tp, tasks.run_function, tp, "gather_whole", inputs, [weight] * tp)):
        assert torch.equal(out, torch.cat(inputs, 1))
        assert torch.equal(grad, weight.chunk(tp, 1)[rank])


@pytest.mark.parametrize("tp", RANKS)
def test_gather_shares_takes_uneven_ones(tp: int) -> None:
    whole, weight = tasks.random(2, 3, 4 * tp - 1), tasks.random(2, 3, 4 * tp - 1, seed=9)
    sizes = [4] * (tp - 1) + [3]
    inputs = list(whole.split(sizes, -1))
    answers = pool().run(tp, tasks.run_function, tp, "gather_shares", inputs, [weight] * tp, (4 * tp - 1,))
    for rank, (out, grad) in enumerate(answers):
        assert torch.equal(out, whole)
        assert torch.equal(grad, weight.split(sizes, -1)[rank])


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "split", "gather_whole"])
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_what_has_no_elements_passes_without_an_exchange(name: str, shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    weight = torch.zeros(()) if name == "reduce" else torch.zeros(1, 1, 1)
    for out, grad in pool().run(2, tasks.run_function, 2, name, [empty] * 2, [weight] * 2):
        assert out.numel() == 0
        assert grad.shape == empty.shape
