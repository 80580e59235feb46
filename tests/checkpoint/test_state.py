from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dthpc.checkpoint import state as subject
from dthpc.checkpoint.shares import whole
from dthpc.checkpoint.state import TrainingState
from dthpc.errors import UserError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_a_tied_parameter_has_one_name_and_a_scratch_buffer_none() -> None:
    assert [share.name for share in subject.model_shares(TrainingState(Tied()))] == ["model.embed.weight", "model.mean"]


def test_wrappers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = list(subject.named_parameters(TrainingState(plain)))
    plain[1] = checkpoint_wrapper(plain[1])
    wrapped = torch.compile(plain)
    assert isinstance(wrapped, nn.Module)
    assert list(subject.named_parameters(TrainingState(wrapped))) == names


def test_chunks_of_a_model_share_one_space_of_names() -> None:
    first, second = nn.ModuleDict({"layer0": nn.Linear(2, 2)}), nn.ModuleDict({"layer1": nn.Linear(2, 2)})
    names = subject.named_parameters(TrainingState([first, second]))
    assert list(names) == ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]
    with pytest.raises(UserError, match=r"model=layer0.weight: two chunks"):
        subject.named_parameters(TrainingState([first, first]))


def test_an_extra_state_is_refused_and_not_lost() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(UserError, match="extra state"):
        subject.model_shares(TrainingState(nn.Sequential(Extra(1, 1))))


def test_pieces_replace_the_parameters_and_not_the_buffers() -> None:
    piece = whole("head.weight", torch.zeros(5, 3))
    shares = subject.model_shares(TrainingState(Tied(), pieces=[piece]))
    assert [share.name for share in shares] == ["model.head.weight", "model.mean"]
    assert shares[0].tensor is piece.tensor


def test_what_replicas_share_is_cut_like_the_pieces() -> None:
    anchor, momentum = [torch.ones(5, 3)], [torch.zeros(5, 3)]
    replica = subject.Replica(0, 2, {"anchor": anchor, "momentum": momentum})
    state = TrainingState(Tied(), pieces=[whole("embed.weight", torch.zeros(5, 3))], replica=replica)
    shares = subject.outer_shares(state)
    assert [share.name for share in shares] == ["outer.anchor.embed.weight", "outer.momentum.embed.weight"]
    assert shares[0].tensor is anchor[0]
    assert subject.outer_shares(TrainingState(Tied())) == []
