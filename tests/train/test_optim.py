from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dthpc.errors import UserError
from dthpc.models.gpt import GPT
from dthpc.parallel.parts import Part, Piece, whole_parts
from dthpc.train.optim import build_optimizer, parameter_groups, set_learning_rate

# Those of torch that update step by step and take dense gradients of any shape.
ELEMENT_WISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def model() -> GPT:
    return GPT(vocab_size=8, dim=8, layers=1, heads=2, norm="layer", position="learned", max_seq_len=4)


def optim(**changes: Any) -> Any:
    fields = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5, "arguments": {"betas": [0.8, 0.9]}}
    return OmegaConf.create({**fields, **changes})


def whole_pieces(net: nn.Module) -> list[Piece]:
    """What a single process trains."""
    return [Piece(part, 0, tensor.numel(), tensor) for tensor, part in whole_parts([net]).items()]


def names_of(group: dict[str, Any], net: GPT) -> set[str]:
    by_id = {id(p): name for name, p in net.named_parameters()}
    return {by_id[id(p)] for p in group["params"]}


def flat(name: str, shape: tuple[int, ...], start: int, stop: int) -> Piece:
    return Piece(Part(name, shape), start, stop, nn.Parameter(torch.ones(stop - start)))


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    net = model()
    decayed, exempt = parameter_groups(whole_pieces(net), 0.5)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.5, 0.0)
    assert "blocks.0.mlp.up.weight" in names_of(decayed, net)
    assert all(p.dim() < 2 for p in exempt["params"])
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(net.parameters()))


def test_patterns_exempt_more() -> None:
    net = model()
    decayed, exempt = parameter_groups(whole_pieces(net), 0.5, ["embed.*", "position.*"])
    assert {"embed.weight", "position.weight"} <= names_of(exempt, net)
    assert "embed.weight" not in names_of(decayed, net)


def test_flat_pieces_are_grouped_by_the_shape_of_the_whole_parameter_and_keep_their_order() -> None:
    pieces = [flat("b", (8,), 0, 8), flat("w", (4, 4), 2, 9), flat("embed.w", (4, 4), 0, 5), flat("v", (2, 2), 0, 4)]
    decayed, exempt = parameter_groups(pieces, 0.5, ["embed.*"])
    assert [id(p) for p in decayed["params"]] == [id(pieces[1].tensor), id(pieces[3].tensor)]
    assert [id(p) for p in exempt["params"]] == [id(pieces[0].tensor), id(pieces[2].tensor)]


@pytest.mark.parametrize("name", ELEMENT_WISE)
@pytest.mark.parametrize("pieces", [[], [flat("w", (2, 2), 0, 3)], [flat("b", (2,), 0, 2)], [flat("w", (2, 2), 4, 4)]])
def test_a_rank_without_pieces_of_a_group_or_of_any_has_the_same_groups_and_steps(
    name: str, pieces: list[Piece]
) -> None:
    built = build_optimizer(pieces, optim(_target_=f"torch.optim.{name}", arguments={}))
    assert [group["weight_decay"] for group in built.param_groups] == [0.5, 0.0]
    set_learning_rate(built, 0.25)
    for piece in pieces:
        piece.tensor.grad = torch.ones_like(piece.tensor)
    for _ in range(2):
        built.step()
    assert [group["lr"] for group in built.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_pieces_end_up_as_the_whole_parameter_does(name: str) -> None:
    """The optimizers that ZeRO allows are element-wise, and so is the way in which they are called here."""
    start, gradients = torch.linspace(-1, 1, 12), torch.linspace(-2, 1, 36).view(3, 12)
    whole = Piece(Part("w", (3, 4)), 0, 12, nn.Parameter(start.clone().view(3, 4)))
    parts = [Piece(Part("w", (3, 4)), a, b, nn.Parameter(start[a:b].clone())) for a, b in ((0, 5), (5, 6), (6, 12))]
    config = optim(_target_=f"torch.optim.{name}", arguments={}, lr=0.01)
    one, several = build_optimizer([whole], config), build_optimizer(parts, config)
    for gradient in gradients:
        whole.tensor.grad = gradient.view(3, 4).clone()
        for piece in parts:
            piece.tensor.grad = gradient[piece.start : piece.stop].clone()
        one.step()
        several.step()
    # A vector unit may fuse a multiplication and an addition where the rest of a range does not.
    ended = torch.cat([piece.tensor.detach() for piece in parts])
    torch.testing.assert_close(ended, whole.tensor.detach().flatten(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(whole.tensor.detach().flatten(), start)


def test_the_class_gets_its_arguments_and_the_fast_form() -> None:
    built = build_optimizer(whole_pieces(model()), optim())
    assert type(built) is torch.optim.AdamW
    assert built.param_groups[0]["betas"] == (0.8, 0.9)
    assert built.param_groups[0]["fused"]
    plain = build_optimizer(whole_pieces(model()), optim(arguments={"foreach": True}))
    assert not plain.param_groups[0]["fused"]


def test_setting_the_rate_reaches_every_group() -> None:
    built = build_optimizer(whole_pieces(model()), optim(_target_="torch.optim.SGD", arguments={}))
    set_learning_rate(built, 0.025)
    assert [group["lr"] for group in built.param_groups] == [0.025, 0.025]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_target_": "torch.optim.AdamWW"}, "optim._target_=torch.optim.AdamWW: cannot be imported"),
        ({"_target_": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"_target_": "torch.optim.LBFGS", "arguments": {}}, "optim._target_=torch.optim.LBFGS: its step evaluates"),
        ({"arguments": {"momentum": 0.9}}, "AdamW refuses its arguments"),
        ({"arguments": {"betas": [2.0, 0.9]}}, "optim.arguments: AdamW refuses its arguments: Invalid beta"),
        ({"lr": -0.5}, "optim.lr=-0.5: AdamW refuses its arguments: Invalid learning rate"),
        ({"lr": float("nan")}, "optim.lr=nan: AdamW refuses"),
        ({"_target_": "torch.optim.SGD", "lr": -1, "arguments": {}}, "optim.lr=-1: SGD refuses"),
        ({"weight_decay": -0.5}, "optim.weight_decay=-0.5: AdamW refuses its arguments: Invalid weight_decay"),
        ({"arguments": {"weight_decay": -0.5}}, "optim.arguments: AdamW refuses its arguments: Invalid weight_decay"),
    ],
)
@pytest.mark.parametrize("empty", [False, True])
def test_mistakes_are_told_also_by_a_rank_without_pieces(changes: dict[str, Any], words: str, empty: bool) -> None:
    with pytest.raises(UserError) as caught:
        build_optimizer([] if empty else whole_pieces(model()), optim(**changes))
    assert words in str(caught.value)
