from __future__ import annotations

import math

import torch

from dthpc.models.layers import Attention, LearnedPositions, rope_table, rotate


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = rope_table(8, 50)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 50, 8) for _ in range(2))
    products = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7, 30):
        diagonal = torch.diagonal(products, -distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(products[20, 0], products[0, 20])


def test_rotation_keeps_lengths_and_types() -> None:
    cos, sin = rope_table(6, 9)
    x = torch.randn(2, 3, 9, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_attention_equals_its_formula() -> None:
    torch.manual_seed(0)
    layer = Attention(12, 3, 3, bias=True, dropout=0.0)
    x = torch.randn(2, 5, 12)
    q, k, v = (f(x).view(2, 5, 3, 4).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    expected = layer.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 12))
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-5, atol=1e-6)


def test_positions_of_a_slice_are_those_of_its_place() -> None:
    layer = LearnedPositions(9, 4)
    torch.nn.init.normal_(layer.weight)
    x = torch.zeros(2, 8, 4)
    whole = layer(x)
    assert torch.equal(whole[1], layer.weight[:8])
    layer.shard = (1, 1, 2)
    assert torch.equal(layer(x[:, 4:]), whole[:, 4:])


def test_attention_in_both_directions_sees_what_comes_later() -> None:
    torch.manual_seed(0)
    layer = Attention(8, 2, 1, bias=False, dropout=0.0, causal=False)
    x = torch.randn(1, 4, 8, requires_grad=True)
    layer(x, None)[0, 0].sum().backward()
    assert x.grad is not None
    assert (x.grad[0].abs().sum(-1) > 0).all()


def test_longer_tables_of_positions_are_cut() -> None:
    torch.manual_seed(0)
    layer = Attention(8, 2, 2, bias=False, dropout=0.0)
    x = torch.randn(1, 4, 8)
    short, long = rope_table(4, 4), rope_table(4, 9)
    assert torch.equal(layer(x, short), layer(x, long))
