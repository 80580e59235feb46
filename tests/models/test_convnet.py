from __future__ import annotations

import pytest
import torch

from dthpc.errors import UserError
from dthpc.models.convnet import ConvNet
from dthpc.models.init import init_parameters
from tests.models.training import train_on_digits


def build(**fields: object) -> ConvNet:
    model = ConvNet(**{"width": 8, **fields})  # type: ignore[arg-type]
    init_parameters(model, 3)
    return model


def test_scores_have_gradients_for_each_parameter() -> None:
    model = build(channels=3, classes=7, depths=[2, 1])
    images = torch.randn(3, 3, 9, 12, generator=torch.Generator().manual_seed(0))
    scores = model(images)
    assert scores.shape == (3, 7)
    scores.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


def test_a_sample_does_not_see_the_others_of_its_batch() -> None:
    model = build()
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-5, atol=1e-6)


def test_deviations_keep_the_size_of_activations() -> None:
    model = build(width=64)
    weight = model.get_parameter("blocks.1_0.first.weight")
    assert abs(weight.std().item() / (2 / (64 * 9)) ** 0.5 - 1) < 0.05
    assert abs(model.head.weight.std().item() / 128**-0.5 - 1) < 0.1
    assert torch.equal(model.norm.weight, torch.ones(128))


def test_it_learns_the_digits() -> None:
    assert train_on_digits(ConvNet(width=16), steps=25, lr=5e-3) > 0.6


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.width=20: .*8 groups.*model\.width=(16|24)"):
        ConvNet(width=20)
