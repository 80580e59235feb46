"""Recomputed activations: the same gradients bit for bit, and fewer bytes kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dthpc.config.parallel import ActivationConfig
from dthpc.errors import UserError
from dthpc.models.convnet import ConvNet
from dthpc.models.dropout import DropoutStream, attach
from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.models.vit import ViT
from dthpc.parallel.activations import checkpoint_activations, layers_of
from dthpc.parallel.pipeline.weights import WeightStore, defer_weights

TOKENS = torch.randint(0, 19, (2, 32), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Users(nn.Module):
    """A model as users write them: layers in a list, torch's own attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embed": nn.Embedding(19, 16), "layers": nn.ModuleList()})
        for _ in range(3):
            self.parts["layers"].append(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.parts["embed"](tokens)
        for layer in self.parts["layers"]:
            x = layer(x, src_mask=None)
        return x


def gpt(dropout: float = 0.2) -> nn.Module:
    model = GPT(vocab_size=19, dim=16, layers=3, heads=4, kv_heads=2, max_seq_len=32, dropout=dropout)
    stream = DropoutStream(1)
    stream.samples = range(2)
    attach(model, stream)
    return model


def vit() -> nn.Module:
    return ViT(dim=16, layers=2, heads=2, dropout=0.2)


def run(build: Callable[[], nn.Module], mode: str, every: int = 1, autocast: bool = False) -> tuple[list[Tensor], int]:
    """Gradients of a training pass, and the bytes that it kept for the backward pass."""
    torch.manual_seed(5)
    model = build()
    init_parameters(model, 3)
    checkpoint_activations([model], ActivationConfig(mode, every))
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    inputs = IMAGES if isinstance(model, ViT | ConvNet) else TOKENS
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(inputs).float().square().mean()
        forward_kept = kept
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], forward_kept


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("build", [gpt, vit, Users])
def test_gradients_are_the_same_bit_for_bit_under_dropout(build: Any, mode: str, autocast: bool) -> None:
    expected, kept = run(build, "none", autocast=autocast)
    found, kept_less = run(build, mode, autocast=autocast)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert kept_less < kept


def test_bytes_kept_fall_with_what_is_recomputed() -> None:
    none, selective, second, full = (run(gpt, *mode)[1] for mode in (("none",), ("selective",), ("full", 2), ("full",)))
    assert full < second < none
    assert full < selective < none
    # Of a whole layer only its input is left, 2·32·16 values of 4 bytes: the rest is embedding, norm and head.
    assert full < 3 * 2 * 32 * 16 * 4 + 40_000


def test_convolutions_are_recomputed_too_and_hold_no_attention() -> None:
    expected, kept = run(ConvNet, "none")
    found, kept_less = run(ConvNet, "full")
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert kept_less < kept
    with pytest.raises(UserError, match="hold no attention"):
        run(ConvNet, "selective")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_several_micro_batches_are_each_computed_again_with_their_own_masks(mode: str) -> None:
    gradients = []
    for used in ("none", mode):
        model = gpt()
        init_parameters(model, 3)
        checkpoint_activations([model], ActivationConfig(used))
        stream = model.get_submodule("dropout").stream
        losses = []
        for first in (0, 2):
            stream.samples = range(first, first + 2)
            losses.append(model(TOKENS).square().mean())
        for first, loss in zip((0, 2), losses, strict=True):
            stream.samples = range(first, first + 2)
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_weight_gradients_may_wait(mode: str) -> None:
    expected, _ = run(gpt, "none")
    model, store = gpt(), WeightStore()
    init_parameters(model, 3)
    checkpoint_activations([model], ActivationConfig(mode))
    defer_weights([model], store)
    loss = model(TOKENS).square().mean()
    with store.defer(0):
        loss.backward()
    later = store.compute(0)
    # All matrices of the three layers; the tied embedding does not wait.
    assert len(later) == 3 * 7
    for parameter, gradient in later:
        assert parameter.grad is None
        parameter.grad = gradient
    found = [p.grad for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_hooks_of_a_layer_run_once_a_pass() -> None:
    model = gpt()
    init_parameters(model, 1)
    layer = model.get_submodule("blocks.1")
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    checkpoint_activations([model], ActivationConfig("full"))
    model(TOKENS).sum().backward()
    assert calls == ["before", "after"]


def test_a_stage_chooses_the_layers_that_the_whole_model_chooses() -> None:
    model = gpt()
    whole = {id(layer): number for number, layer in layers_of(model)}
    del model.get_submodule("blocks")["0"]  # type: ignore[operator]
    assert [(number, whole[id(layer)]) for number, layer in layers_of(model)] == [(1, 1), (2, 2)]


def test_without_gradients_nothing_is_kept_or_run_twice() -> None:
    model = gpt(0.0)
    init_parameters(model, 1)
    expected = model(TOKENS)
    checkpoint_activations([model], ActivationConfig("full"))
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected)


def test_a_model_without_layers_is_refused_and_an_empty_stage_is_not() -> None:
    with pytest.raises(UserError, match=r"Linear keeps no layers in an nn\.ModuleList.*\n?.*mode=none"):
        checkpoint_activations([nn.Linear(2, 2)], ActivationConfig("full"))
    stage = gpt()
    stage.blocks = nn.ModuleDict()
    checkpoint_activations([stage], ActivationConfig("selective"))
