from __future__ import annotations

import pytest
import torch

from dthpc.errors import UserErrors
from dthpc.models.init import init_parameters
from dthpc.models.vit import Patches, ViT
from tests.models.training import train_on_digits


def build(**fields: object) -> ViT:
    model = ViT(**{"dim": 16, "layers": 2, "heads": 4, **fields})  # type: ignore[arg-type]
    init_parameters(model, 3)
    return model.eval()


def images(channels: int = 1) -> torch.Tensor:
    return torch.randn(3, channels, 8, 8, generator=torch.Generator().manual_seed(0))


def test_patches_are_squares_row_by_row() -> None:
    module = Patches(2, 4, 5)
    x = images(2)
    expected = module.linear(x[:, :, :4, 4:].flatten(1))
    torch.testing.assert_close(module(x)[:, 1], expected)
    assert module(x).shape == (3, 4, 5)


def test_scores_have_gradients_for_each_parameter() -> None:
    model = build(channels=3, classes=7)
    scores = model(images(3))
    assert scores.shape == (3, 7)
    scores.square().sum().backward()
    # The same value added to all keys of a head changes no attention weight.
    missing = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() < 1e-9]
    assert missing == [f"blocks.{number}.attention.k.bias" for number in range(2)]


def test_every_patch_sees_every_other() -> None:
    model = build()
    grad = []
    for place in (0, 15):
        x = images().requires_grad_()
        states = model.blocks["0"](model.position(model.embed(x)))
        states[:, place].square().sum().backward()
        assert x.grad is not None
        grad.append(x.grad.abs().amin(dim=(0, 1)).min())
    assert min(grad) > 0


def test_the_place_of_a_patch_matters() -> None:
    model = build()
    assert (model(images()) - model(images().flip(2))).abs().max() > 1e-3


def test_it_learns_the_digits() -> None:
    torch.manual_seed(0)
    assert train_on_digits(ViT(layers=2), steps=40, lr=5e-3) > 0.5


def test_sizes_that_do_not_fit_are_told_together() -> None:
    with pytest.raises(UserErrors) as caught:
        ViT(image_size=8, patch_size=3, dim=10, heads=4)
    assert "model.patch_size=3" in str(caught.value)
    assert "model.heads=4" in str(caught.value)
