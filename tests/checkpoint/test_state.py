from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dthpc.checkpoint import state as subject
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
    assert list(subject.model_tensors(TrainingState(Tied()))) == ["model.embed.weight", "model.mean"]


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
        subject.model_tensors(TrainingState(nn.Sequential(Extra(1, 1))))


def test_reading_an_optimizer_before_its_first_step_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    assert subject.optimizer_tensors(TrainingState(model, optimizer)) == {}
    assert len(optimizer.state) == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_state_of_each_optimizer_goes_by_parameter_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    adam = torch.optim.Adam(model[1].parameters(), lr=torch.tensor(0.1), betas=(0.5, 0.75))
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    sgd.step()
    state = TrainingState(model, [adam, sgd])
    assert sorted(subject.optimizer_tensors(state)) == [
        "optim.0.bias.momentum_buffer",
        "optim.0.weight.momentum_buffer",
        "optim.1.bias.exp_avg",
        "optim.1.bias.exp_avg_sq",
        "optim.1.bias.step",
        "optim.1.weight.exp_avg",
        "optim.1.weight.exp_avg_sq",
        "optim.1.weight.step",
    ]
    records = subject.group_records(state)
    assert [record["class"] for record in records] == ["Adam", "SGD"]
    assert records[0]["params"] == ["1.weight", "1.bias"]
    assert records[0]["options"]["betas"] == [0.5, 0.75]
    assert records[0]["options"]["lr"] == torch.tensor(0.1).item()


def test_an_optimizer_of_a_stranger_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(UserError, match="group 0 holds a parameter that is not in the model"):
        subject.optimizer_groups(TrainingState(nn.Linear(1, 1), optimizer))


def test_a_value_that_is_no_json_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match="scalars: its state cannot be saved as JSON"):
        subject.scalar_records(TrainingState(nn.Linear(1, 1), scalars={"seen": {1, 2}}))
