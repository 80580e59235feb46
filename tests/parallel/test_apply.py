from __future__ import annotations

from typing import Any

import pytest
import torch

from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.parallel.apply import passes_of
from dthpc.parallel.layout import Layout
from tests.parallel import tasks
from tests.ranks import pool
from tests.train.tasks import make_config


def test_replicas_start_equal_and_their_buffers_stay_equal() -> None:
    first, second = pool().run(2, tasks.weights_after_parallelize)
    assert len(first) == 7
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}, {"zero": 2, "pp": 2}])
@pytest.mark.parametrize("meta", [True, False])
def test_every_rank_starts_with_its_part_of_the_one_model(meta: bool, parallel: dict[str, Any]) -> None:
    torch.manual_seed(17)
    whole = GPT(**tasks.SIZES)
    if meta:
        init_parameters(whole, seed=7)
    values = dict(whole.named_parameters())
    seen = set()
    for parts in pool().run(4, tasks.held, meta, parallel):
        for part, value in parts:
            seen.add(part.name)
            expected = values[part.name].detach()
            if part.dim is not None:
                expected = expected.narrow(part.dim, part.start, part.size)
            assert torch.equal(value, expected), part.name
    assert seen == values.keys()


@pytest.mark.parametrize(
    ("batch", "micro_batch", "layout", "expected"),
    [
        (5, None, Layout(), (1, 5)),
        (5, None, Layout(replicate=2), (1, 3)),
        (5, 2, Layout(replicate=2), (2, 2)),
        (16, None, Layout(pp=2), (8, 2)),
        (16, 5, Layout(pp=2), (4, 4)),
        (13, None, Layout(pp=2, replicate=2), (7, 1)),
    ],
)
def test_the_largest_share_is_cut_into_equal_passes(
    batch: int, micro_batch: int | None, layout: Layout, expected: tuple[int, int]
) -> None:
    config = make_config(train={"global_batch": batch, "micro_batch": micro_batch})
    assert passes_of(config, layout) == expected


def test_frozen_parameters_take_no_room_and_get_no_gradient() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    net[0].requires_grad_(False)
    model = tasks.spread(net, tasks.squares)
    assert {piece.part.name for piece in model.shards.pieces} == {"1.weight", "1.bias"}
    assert model.elements == 3 + 1
    model.begin_step(0, 0)
    model.forward_backward([(torch.ones(1, 2), torch.zeros(1))], lambda: 1, None)
    model.finish_step()
    assert net[0].weight.grad is None
    assert model.shards.storage_bytes()["gradients"] == 4 * (3 + 1)
