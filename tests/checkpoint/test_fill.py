from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.checkpoint import fill
from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.optimizers import optimizer_shares
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.snapshot import Snapshot, snapshot
from dthpc.checkpoint.state import TrainingState
from dthpc.errors import UserError, UserErrors
from tests.checkpoint.jobs import build, train


def saved(state: TrainingState) -> Snapshot:
    """What a checkpoint of a state holds; its records have been through JSON."""
    taken = snapshot(state, 3, Ranks(), copy=True)
    return Snapshot(taken.step, taken.shares, taken.described, json.loads(json.dumps(taken.records)))


def trained(seed: int = 0, **options: Any) -> TrainingState:
    job = build(seed=seed, **options)
    train(job, 0, 3)
    return job.state


def match(live: TrainingState, held: Snapshot) -> None:
    fill.check_match("step-3", [fill.expectation(live)], held.described, held.records)


def refusal(live: TrainingState, held: Snapshot) -> UserError:
    with pytest.raises(UserError) as caught:
        match(live, held)
    assert (caught.value.key, caught.value.value) == ("checkpoint", "step-3")
    return caught.value


def load(live: TrainingState, held: Snapshot) -> None:
    """Fill the optimizer as a restore does, with the bytes that were saved."""
    targets = fill.optimizer_targets(live, held.described)
    held_tensors = {share.name: share.tensor for share in held.shares}
    for target in targets:
        target.share.tensor.copy_(held_tensors[target.share.name])
    fill.fill_optimizer(live, targets, held.records["optimizer"])


def kept(state: TrainingState) -> dict[str, torch.Tensor]:
    """What the optimizers keep, by key."""
    return {share.name: share.tensor for share in optimizer_shares(state)}


def test_the_same_job_matches_before_its_first_step_and_after() -> None:
    match(build(seed=5).state, saved(trained()))
    match(trained(seed=5), saved(build().state))


def test_an_expectation_survives_json_and_does_not_depend_on_values() -> None:
    expected = fill.expectation(trained())
    assert json.loads(json.dumps(expected)) == expected == fill.expectation(build(seed=9).state)
    assert expected["scalars"] == ["samples"]
    assert expected["stateful"] == ["schedule"]
    assert set(expected["optimizer"].values()) == {"AdamW"}


def test_another_shape_is_told_with_both_shapes() -> None:
    why = refusal(build(hidden=8).state, saved(trained())).why
    assert "model.body.0.weight is torch.float32 (7, 12) there and torch.float32 (8, 12) here" in why


def test_another_type_is_told() -> None:
    job = build()
    job.model.double()
    assert "torch.float32 (7,) there and torch.float64 (7,) here" in refusal(job.state, saved(trained())).why


def test_missing_and_unexpected_names_are_told_together() -> None:
    live = build().state
    held = saved(trained())
    held.described["model.extra"] = held.described.pop("model.seen")
    del held.records["scalars"]["samples"]
    held.records["stateful"]["scaler"] = {}
    why = refusal(live, held).why
    for words in (
        "it lacks the tensors model.seen",
        "it holds the tensors model.extra, unknown here",
        "it lacks the scalars samples",
        "it holds the stateful scaler, unknown here",
    ):
        assert words in why


def test_another_optimizer_is_told_once_and_not_for_each_parameter() -> None:
    job = build()
    job.state.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    why = refusal(job.state, saved(trained())).why
    assert why.count("the optimizer is AdamW there and SGD here") == 1


def test_a_parameter_that_is_no_longer_trained_is_told() -> None:
    job = build()
    job.optimizer.param_groups[1]["params"].pop()
    assert "it holds the optimizer state of body.3.bias, unknown here" in refusal(job.state, saved(trained())).why


def test_a_long_list_is_cut_short_and_counted() -> None:
    wide = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    state = TrainingState(wide)
    held = saved(TrainingState(nn.ModuleList(nn.Linear(2, 1) for _ in range(20))))
    why = refusal(state, held).why
    assert why.count(" here") == 5
    assert why.endswith("and 15 more")
    held.described.clear()
    assert "and 35 more" in refusal(state, held).why


def test_chunks_of_several_ranks_are_matched_as_one_state() -> None:
    first, second = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})
    held = saved(TrainingState([first, second]))
    parts = [fill.expectation(TrainingState(chunk)) for chunk in (first, second)]
    fill.check_match("step-3", parts, held.described, held.records)
    with pytest.raises(UserError, match=r"it holds the tensors model\.b\.bias, model\.b\.weight, unknown here"):
        fill.check_match("step-3", parts[:1], held.described, held.records)


def test_every_fact_that_differs_is_told_and_how_to_go_on() -> None:
    fill.check_meta("c", {"data": "abc"}, {"data": "abc", "more": 1})
    with pytest.raises(UserErrors) as caught:
        fill.check_meta("c", {"data": "abc", "vocab": 5, "same": None}, {"data": "xyz"})
    assert [error.key for error in caught.value.errors] == ["data", "vocab"]
    assert caught.value.errors[0].message() == (
        "data='abc': the checkpoint c was written with 'xyz'. Instead: go on with data='xyz', or start another run"
    )


def test_optimizer_state_comes_back_bit_for_bit_into_an_optimizer_without_any() -> None:
    source, live = trained(), build(seed=5).state
    load(live, saved(source))
    first, second = kept(source), kept(live)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [list(state) for state in live.optimizers()[0].state.values()] == [["step", "exp_avg", "exp_avg_sq"]] * 4


def test_state_that_is_there_already_is_filled_in_place() -> None:
    live = trained(seed=5)
    before = {key: tensor.data_ptr() for key, tensor in kept(live).items()}
    load(live, saved(trained()))
    assert {key: tensor.data_ptr() for key, tensor in kept(live).items()} == before


def test_state_that_the_checkpoint_does_not_have_is_forgotten() -> None:
    live = trained(seed=5)
    load(live, saved(build().state))
    assert kept(live) == {}
    assert len(live.optimizers()[0].state) == 0


def test_only_the_parameters_of_this_rank_get_targets() -> None:
    held = saved(trained())
    job = build(seed=5)
    job.optimizer.param_groups[0]["params"].pop()
    job.optimizer.param_groups.pop()
    names = {target.piece.name for target in fill.optimizer_targets(job.state, held.described)}
    assert names == {"body.0.weight"}


def test_fp32_state_of_a_bf16_parameter_stays_fp32() -> None:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    described = {"optim.weight.momentum_buffer": TensorRecord((2, 3), "torch.float32")}
    (target,) = [each.share.tensor for each in fill.optimizer_targets(state, described)]
    assert (target.dtype, target.shape, target.requires_grad) == (torch.float32, (2, 3), False)


def test_state_of_another_shape_than_its_parameter_gets_its_own() -> None:
    model = nn.Linear(3, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    described = {"optim.weight.row_sums": TensorRecord((2,), "torch.float64")}
    (target,) = [each.share.tensor for each in fill.optimizer_targets(state, described)]
    assert (target.dtype, target.shape) == (torch.float64, (2,))


def shard() -> tuple[Share, TrainingState]:
    """Elements 2 to 7 of a 3x4 weight, under an optimizer without any state."""
    piece = Share("weight", (3, 4), (0, 0), (3, 4), 2, 7, nn.Parameter(torch.zeros(5)))
    return piece, TrainingState(nn.Module(), torch.optim.AdamW([piece.tensor]), pieces=[piece])


def test_room_for_the_state_of_a_shard_is_cut_like_it_and_its_step_is_whole() -> None:
    piece, state = shard()
    described = {
        "optim.weight.exp_avg": TensorRecord((3, 4), "torch.float32"),
        "optim.weight.step": TensorRecord((), "torch.float32"),
    }
    average, step = fill.optimizer_targets(state, described)
    assert average.share.tensor.shape == (5,)
    assert (average.share.start, average.share.stop, average.share.shape) == (2, 7, (3, 4))
    assert (step.share.shape, step.share.tensor.shape) == ((), ())
    assert average.piece is piece


def test_room_is_made_where_the_job_says() -> None:
    piece, state = shard()
    made = []

    def allocate(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.ones_like(tensor, dtype=dtype))
        return made[-1]

    state.allocate = allocate
    (target,) = fill.optimizer_targets(state, {"optim.weight.exp_avg": TensorRecord((3, 4), "torch.float64")})
    assert target.share.tensor is made[0]
    fill.fill_optimizer(state, [target], [{"params": ["weight"], "state": {}, "options": {}}])
    kept = state.optimizers()[0].state[piece.tensor]["exp_avg"]
    assert kept.data_ptr() == made[0].data_ptr()


def test_state_that_is_not_element_by_element_is_refused_for_a_shard() -> None:
    _, state = shard()
    with pytest.raises(UserError, match=r"optimizer=AdamW: it keeps row_sums of shape \(3,\) for 5 elements of weight"):
        fill.optimizer_targets(state, {"optim.weight.row_sums": TensorRecord((3,), "torch.float32")})


def test_options_come_back_as_what_they_were() -> None:
    source, live = trained(), build(seed=5).state
    source.optimizers()[0].param_groups[0]["betas"] = (0.5, 0.75)
    live.optimizers()[0].param_groups[0]["lr"] = torch.tensor(99.0)
    tensor = live.optimizers()[0].param_groups[0]["lr"]
    load(live, saved(source))
    first, second = live.optimizers()[0].param_groups
    assert first["betas"] == (0.5, 0.75)
    assert first["lr"] is tensor
    assert tensor.item() == pytest.approx(0.02 * 0.9**3)
    assert (second["weight_decay"], second["betas"]) == (0.0, (0.9, 0.999))


def test_how_an_update_is_computed_is_the_jobs_own_choice() -> None:
    live = build(seed=5).state
    live.optimizers()[0].param_groups[0]["foreach"] = True
    load(live, saved(trained()))
    assert live.optimizers()[0].param_groups[0]["foreach"] is True


def test_state_that_is_no_tensor_comes_back_too() -> None:
    source, live = trained(), build(seed=5).state
    optimizer = source.optimizers()[0]
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["kind"] = "warm"
    load(live, saved(source))
    assert live.optimizers()[0].state[live.optimizers()[0].param_groups[0]["params"][0]]["kind"] == "warm"


def test_groups_may_be_split_and_must_not_mix_what_had_other_options() -> None:
    held = saved(trained())
    job = build(seed=5)
    job.state.optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in job.model.parameters()])
    fill.check_groups(job.state, held.records["optimizer"])
    job.state.optimizer = torch.optim.AdamW(job.model.parameters())
    with pytest.raises(UserErrors, match=r"group 0 mixes .* options: body\.0\.bias, body\.3\.bias"):
        fill.check_groups(job.state, held.records["optimizer"])


def test_scalars_and_schedules_come_back_and_the_dict_stays_the_same() -> None:
    source, job = trained(), build(seed=5)
    scalars = job.state.scalars
    fill.fill_scalars(job.state, saved(source).records)
    assert job.state.scalars is scalars
    assert scalars == {"samples": 12}
    assert job.scheduler.last_epoch == 3


def test_reading_what_is_expected_changes_nothing(tmp_path: Path) -> None:
    job = build(seed=5)
    before = [parameter.clone() for parameter in job.model.parameters()]
    fill.expectation(job.state)
    fill.optimizer_targets(job.state, saved(trained()).described)
    assert len(job.optimizer.state) == 0
    assert all(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))
