"""Where models may be cut: every parameter in one layer, costs in FLOPs, and stages that together are the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.models.convnet import ConvNet
from dthpc.models.dropout import DropoutStream, attach
from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.models.pipeline import PipelineModel
from dthpc.models.size import gpt_flops_per_token
from dthpc.models.vit import ViT

FIELDS = {"vocab_size": 19, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "max_seq_len": 12}
LEARNED = {"position": "learned", "norm": "layer", "mlp": "gelu", "tie_embeddings": False}
MODELS = [
    lambda dropout: GPT(**FIELDS, dropout=dropout),  # type: ignore[arg-type]
    lambda dropout: GPT(**FIELDS, **LEARNED, dropout=dropout),  # type: ignore[arg-type]
    lambda dropout: ViT(dim=16, layers=4, heads=4, dropout=dropout),
]


def stage_of(model: Any, first: int, last: int) -> nn.Module:
    """A copy of the model that holds some of its layers."""
    layers = model.pipeline_layers()
    stage = copy.deepcopy(model)
    for number, layer in enumerate(layers):
        for name in layer.names if not first <= number < last else ():
            if name.startswith("blocks."):
                del stage.blocks[name.removeprefix("blocks.")]
            else:
                setattr(stage, name, None)
    return stage


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_stages_together_are_the_whole_model(build: Any, dropout: float) -> None:
    model = build(dropout)
    init_parameters(model, 3)
    generator = torch.Generator().manual_seed(0)
    is_gpt = isinstance(model, GPT)
    x = torch.randint(0, 19, (2, 12), generator=generator) if is_gpt else torch.randn(2, 1, 8, 8, generator=generator)
    stream = DropoutStream(5)
    stream.samples = range(6, 8)
    stages = [stage_of(model, *bounds) for bounds in ((0, 1), (1, 3), (3, 4))]
    for module in (model, *stages):
        attach(module, stream)
    expected = model(x)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("build", MODELS)
def test_every_parameter_is_in_one_layer(build: Any) -> None:
    model = build(0.0)
    names = [name for layer in model.pipeline_layers() for name in layer.names]
    assert len(names) == len(set(names))
    held = {f"{name}.{inner}" for name in names for inner, _ in model.get_submodule(name).named_parameters()}
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == held


@pytest.mark.parametrize("extra", [{}, LEARNED])
def test_costs_are_a_third_of_the_formula(extra: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = GPT(**{**FIELDS, "dim": 512, "vocab_size": 5000, **extra})
    layers = model.pipeline_layers()
    total = sum(layer.cost for layer in layers)
    formula = gpt_flops_per_token({**FIELDS, "dim": 512, "vocab_size": 5000, **extra}, 12) / 3
    # The formula counts norms, biases and the learned positions too.
    assert total == pytest.approx(formula, rel=5e-3)
    assert layers[0].cost == layers[1].cost
    assert layers[-1].cost == layers[0].cost + 2 * 512 * 5000


def test_models_say_whether_they_can_be_cut() -> None:
    assert isinstance(MODELS[0](0.0), PipelineModel)
    assert not isinstance(ConvNet(), PipelineModel)
