from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.models.gpt import GPT
from dthpc.train.optim import build_optimizer, parameter_groups, set_learning_rate


def model() -> GPT:
    return GPT(vocab_size=8, dim=8, layers=1, heads=2, norm="layer", position="learned", max_seq_len=4)


def optim(**changes: Any) -> Any:
    fields = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5, "arguments": {"betas": [0.8, 0.9]}}
    return OmegaConf.create({**fields, **changes})


def names_of(group: dict[str, Any], net: GPT) -> set[str]:
    by_id = {id(p): name for name, p in net.named_parameters()}
    return {by_id[id(p)] for p in group["params"]}


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    net = model()
    decayed, exempt = parameter_groups(net, 0.5)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.5, 0.0)
    assert "blocks.0.mlp.up.weight" in names_of(decayed, net)
    assert all(p.dim() < 2 for p in exempt["params"])
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(net.parameters()))


def test_patterns_exempt_more() -> None:
    net = model()
    decayed, exempt = parameter_groups(net, 0.5, ["embed.*", "position.*"])
    assert {"embed.weight", "position.weight"} <= names_of(exempt, net)
    assert "embed.weight" not in names_of(decayed, net)


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net.embed.weight.requires_grad_(False)
    assert all(p.requires_grad for group in parameter_groups(net, 0.5) for p in group["params"])


def test_the_class_gets_its_arguments_and_the_fast_form() -> None:
    built = build_optimizer(model(), optim())
    assert type(built) is torch.optim.AdamW
    assert built.param_groups[0]["betas"] == (0.8, 0.9)
    assert built.param_groups[0]["fused"]
    plain = build_optimizer(model(), optim(arguments={"foreach": True}))
    assert not plain.param_groups[0]["fused"]


def test_setting_the_rate_reaches_every_group() -> None:
    built = build_optimizer(model(), optim(_target_="torch.optim.SGD", arguments={}))
    set_learning_rate(built, 0.025)
    assert [group["lr"] for group in built.param_groups] == [0.025, 0.025]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_target_": "torch.optim.AdamWW"}, "optim._target_=torch.optim.AdamWW: cannot be imported"),
        ({"_target_": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"arguments": {"momentum": 0.9}}, "AdamW refuses its arguments"),
        ({"arguments": {"betas": [2.0, 0.9]}}, "optim.arguments: AdamW refuses its arguments: Invalid beta"),
        ({"lr": -0.5}, "optim.lr=-0.5: AdamW refuses its arguments: Invalid learning rate"),
        ({"lr": float("nan")}, "optim.lr=nan: AdamW refuses"),
        ({"_target_": "torch.optim.SGD", "lr": -1, "arguments": {}}, "optim.lr=-1: SGD refuses"),
        ({"weight_decay": -0.5}, "optim.weight_decay=-0.5: AdamW refuses its arguments: Invalid weight_decay"),
        ({"arguments": {"weight_decay": -0.5}}, "optim.arguments: AdamW refuses its arguments: Invalid weight_decay"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_optimizer(model(), optim(**changes))
    assert words in str(caught.value)
