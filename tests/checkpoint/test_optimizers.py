from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.checkpoint import optimizers as subject
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import TrainingState
from dthpc.errors import UserError


def test_reading_an_optimizer_before_its_first_step_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    assert subject.optimizer_shares(TrainingState(model, optimizer)) == []
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
    assert sorted(share.name for share in subject.optimizer_shares(state)) == [
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


def piece_of(name: str, shape: tuple[int, ...], start: int, stop: int, counts: bool = True) -> Share:
    return Share(name, shape, (0,) * len(shape), shape, start, stop, nn.Parameter(torch.ones(stop - start)), counts)


def stepped(*pieces: Share) -> TrainingState:
    optimizer = torch.optim.AdamW([piece.tensor for piece in pieces], lr=0.1)
    for piece in pieces:
        piece.tensor.grad = torch.ones_like(piece.tensor)
    optimizer.step()
    return TrainingState(nn.Module(), optimizer, pieces=pieces)


def test_state_of_a_shard_is_cut_like_it_and_a_step_is_saved_whole() -> None:
    shares = {share.name: share for share in subject.optimizer_shares(stepped(piece_of("w", (3, 4), 2, 7, False)))}
    assert (shares["optim.w.exp_avg"].start, shares["optim.w.exp_avg"].stop) == (2, 7)
    assert shares["optim.w.exp_avg"].shape == (3, 4)
    assert shares["optim.w.step"].shape == ()
    assert not any(share.counts for share in shares.values())


def test_state_of_one_element_is_told_from_a_scalar() -> None:
    shares = {share.name: share for share in subject.optimizer_shares(stepped(piece_of("w", (3,), 2, 3)))}
    assert (shares["optim.w.exp_avg"].shape, shares["optim.w.step"].shape) == ((3,), ())


def test_state_that_cannot_be_cut_is_refused_for_a_shard_and_saved_for_a_whole() -> None:
    shard, complete = piece_of("w", (3, 4), 2, 7), piece_of("v", (3, 4), 0, 12)
    state = stepped(shard, complete)
    optimizer = state.optimizers()[0]
    optimizer.state[complete.tensor]["row_sums"] = torch.zeros(3)
    assert subject.optimizer_shares(state)[-1].shape == (3,)
    optimizer.state[shard.tensor]["row_sums"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"it keeps row_sums of shape \(3,\) for 5 elements of w"):
        subject.optimizer_shares(state)


def record(options: dict[str, float], *names: str, **state: object) -> dict[str, object]:
    return {"class": "AdamW", "params": list(names), "options": options, "state": state}


def test_ranks_that_hold_different_parameters_of_a_group_make_one_group() -> None:
    first = [record({"lr": 0.1}, "a", "b", a={"k": 1}), record({"lr": 0.2}, "d")]
    second = [record({"lr": 0.1}, "b", "c")]
    assert subject.merge_group_records([first, second]) == [
        record({"lr": 0.1}, "a", "b", "c", a={"k": 1}),
        record({"lr": 0.2}, "d"),
    ]


@pytest.mark.parametrize(
    "other",
    [record({"lr": 0.2}, "b"), record({"lr": 0.1}, "b", b={"k": 1}), {**record({"lr": 0.1}, "b"), "class": "SGD"}],
)
def test_ranks_that_contradict_each_other_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"optimizer=b: the ranks differ"):
        subject.merge_group_records([[record({"lr": 0.1}, "a", "b")], [other]])
