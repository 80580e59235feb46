from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.parallel.materialize import broadcast_values, fill, is_meta, slice_of
from dthpc.parallel.parts import Part, whole_parts
from tests.parallel import tasks
from tests.ranks import pool

CPU = torch.device("cpu")


def meta_model() -> GPT:
    with torch.device("meta"):
        return GPT(**tasks.SIZES)


def test_a_model_without_memory_is_filled_as_one_process_fills_it() -> None:
    model, whole = meta_model(), GPT(**tasks.SIZES)
    init_parameters(whole, seed=3)
    parameters = list(model.parameters())
    assert is_meta(model)
    fill([model], whole_parts([model]), 3, CPU)
    assert not is_meta(model)
    # The same objects: what knew the parameters before still does.
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    for (name, value), (other, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(value, expected), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name


def test_other_seeds_give_other_values() -> None:
    first, second = meta_model(), meta_model()
    for seed, model in enumerate((first, second)):
        fill([model], whole_parts([model]), seed, CPU)
    assert not torch.equal(first.embed.weight, second.embed.weight)


def test_a_tied_weight_stays_one() -> None:
    with torch.device("meta"):
        model = GPT(**tasks.SIZES, tie_embeddings=True)
    fill([model], whole_parts([model]), 3, CPU)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(("dim", "start", "size"), [(0, 3, 5), (1, 8, 8), (0, 0, 0)])
def test_a_part_is_filled_with_its_slice_of_the_whole(dim: int, start: int, size: int) -> None:
    model, whole = meta_model(), GPT(**tasks.SIZES)
    init_parameters(whole, seed=3)
    name, expected = "blocks.1.mlp.down.weight", whole.get_parameter("blocks.1.mlp.down.weight").detach()
    down = model.blocks["1"].mlp.down if isinstance(model.blocks, nn.ModuleDict) else model.blocks[1].mlp.down
    shape = [size if number == dim else length for number, length in enumerate(expected.shape)]
    down.weight = nn.Parameter(torch.empty(shape, device="meta"))
    parts = whole_parts([model])
    parts[down.weight] = Part(name, tuple(expected.shape), dim, start, size)
    fill([model], parts, 3, CPU)
    assert torch.equal(down.weight, expected.narrow(dim, start, size))


def test_values_that_are_there_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fill([model], whole_parts([model]), 3, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_parameters_are_filled_and_stay_frozen() -> None:
    model = meta_model()
    model.embed.weight.requires_grad_(False)
    fill([model], whole_parts([model]), 3, CPU)
    assert not model.embed.weight.requires_grad
    assert model.embed.weight.isfinite().all()


def test_a_slice_is_a_view() -> None:
    whole = torch.arange(12.0).view(3, 4)
    part = slice_of(whole, Part("w", (3, 4), 1, 2, 2))
    assert part.tolist() == [[2, 3], [6, 7], [10, 11]]
    part.zero_()
    assert whole[:, 2:].sum() == 0
    assert slice_of(whole, Part("w", (3, 4))) is whole


def test_all_ranks_get_the_first_ones_parameters_and_buffers() -> None:
    first, second, third = pool().run(3, tasks.broadcast)
    for one, two, three in zip(first, second, third, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    own = tasks.Norms(0)
    assert all(torch.equal(a, b) for a, b in zip(first, [*own.parameters(), *own.buffers()], strict=True))
    broadcast_values(own, None)
