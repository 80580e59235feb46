from __future__ import annotations

import hashlib

import torch
from torch import nn

from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters, named_seed


def build(seed: int, **fields: object) -> dict[str, torch.Tensor]:
    model = GPT(vocab_size=17, dim=32, heads=4, **fields)  # type: ignore[arg-type]
    init_parameters(model, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_values_depend_on_seed_and_name_and_on_nothing_drawn_before() -> None:
    torch.manual_seed(0)
    first = build(5)
    torch.manual_seed(99)
    torch.rand(123)
    again, other = build(5), build(6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["blocks.0.attention.q.weight"], first["blocks.1.attention.q.weight"])


def test_a_layer_has_the_same_values_in_a_deeper_model_but_for_the_residual_scale() -> None:
    shallow, deep = build(5, layers=2), build(5, layers=8)
    name = "blocks.1.mlp.up.weight"
    assert torch.equal(shallow[name], deep[name])
    name = "blocks.1.mlp.down.weight"
    torch.testing.assert_close(shallow[name] / 2, deep[name])


def test_deviations_are_as_told() -> None:
    values = build(1, layers=8, norm="layer", position="learned")
    assert abs(values["blocks.3.mlp.up.weight"].std().item() / 0.02 - 1) < 0.1
    assert abs(values["blocks.3.attention.out.weight"].std().item() / (0.02 / 4) - 1) < 0.1
    assert torch.equal(values["norm.weight"], torch.ones(32))
    assert not values["blocks.0.mlp.up.bias"].any()


def test_seeds_of_names_are_the_same_on_every_machine() -> None:
    digest = hashlib.blake2b(b"5\0blocks.0.q", digest_size=8).digest()
    assert named_seed(5, "blocks.0.q") == int.from_bytes(digest, "little") >> 1
    assert named_seed(5, "step", 12, 3) != named_seed(5, "step", 1, 23)


def test_a_model_without_the_method_keeps_its_own_values() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    init_parameters(model, 1)
    assert torch.equal(model.weight, before)
