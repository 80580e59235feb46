from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dthpc.parallel.pipeline.weights import WeightStore, defer_weights, linear

SHAPES = [(5, 7), (3, 5, 7), (2, 3, 5, 7), (0, 7)]


def autocast(bf16: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext()


def backward_twice(model: nn.Module, x: Tensor, bf16: bool, store: WeightStore | None) -> list[Tensor]:
    """Gradients of the input and of all parameters after two passes; with a store in two parts each."""
    x = x.clone().requires_grad_()
    for turn in range(2):
        with autocast(bf16):
            output = model(x).float().square().sum() * (turn + 1)
        with store.defer(turn) if store is not None else nullcontext():
            output.backward()
    for turn in range(2 if store is not None else 0):
        for parameter, gradient in store.compute(turn):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in gradients if gradient is not None]


class Twice(nn.Module):
    """One layer used two times, and recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda y: self.layer(self.norm(y)).tanh(), x, use_reentrant=False)
        return self.layer(inner)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    frozen = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 3))
    frozen[0].weight.requires_grad_(False)
    return {
        "stack": nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 4, bias=False), nn.Tanh()),
        "twice": Twice(),
        "frozen": frozen,
    }


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", ["stack", "twice", "frozen"])
def test_left_gradients_are_those_of_the_plain_pass_bit_for_bit(which: str, shape: tuple[int, ...], bf16: bool) -> None:
    model = models()[which]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected = backward_twice(copy.deepcopy(model), x, bf16, None)
    store = WeightStore()
    defer_weights([model], store)
    # Autocast casts a weight once and adds up what both its uses give in 16 bits; here it is added in the weight's own.
    rounding = 2.0**-7 if which == "twice" and bf16 else 0.0
    for deferred in (store, None):
        found = backward_twice(copy.copy(model), x, bf16, deferred)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=0, atol=rounding * other.abs().max().item() if other.numel() else 0
            )
        for parameter in model.parameters():
            parameter.grad = None


def test_only_the_weights_of_linear_layers_wait() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 2))
    store = WeightStore()
    defer_weights([model], store)
    with store.defer("here"):
        model(torch.randn(3, 7)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert {id(p) for p, _ in store.compute("here")} == {
        id(p) for p in (*model[0].parameters(), *model[2].parameters())
    }
    assert store.compute("here") == []


def test_a_weight_that_something_else_uses_does_not_wait() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    store = WeightStore()
    defer_weights([model], store)
    with store.defer(0):
        model["head"](model["inner"](model["embed"](torch.tensor([1, 2])))).sum().backward()
    assert model["embed"].weight.grad is not None
    assert len(store.compute(0)) == 2


def test_layers_of_other_kinds_take_the_store() -> None:
    class Mine(nn.Linear):
        weight_store: WeightStore | None = None

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight, self.bias, self.weight_store)

    layer, store = Mine(3, 2), WeightStore()
    defer_weights([layer], store)
    assert layer.weight_store is store
    with store.defer(0):
        layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is None
    assert len(store.compute(0)) == 2


def test_without_a_store_or_gradients_it_is_torchs_linear() -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(linear(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias))
    with torch.no_grad():
        assert not linear(x, layer.weight, layer.bias, WeightStore()).requires_grad
    store = WeightStore()
    with store.defer(0):
        # A vector, and a weight that is computed: nothing may wait.
        linear(x[0], layer.weight, None, store).sum().backward()
        linear(x, layer.weight * 2, None, store).sum().backward()
    assert store.compute(0) == []
    assert layer.weight.grad is not None


def test_an_abandoned_step_leaves_nothing() -> None:
    store, layer = WeightStore(), nn.Linear(3, 2)
    defer_weights([layer], store)
    with store.defer(0):
        layer(torch.ones(1, 3)).sum().backward()
    store.clear()
    assert store.compute(0) == []
    assert not store.deferring
