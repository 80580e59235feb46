from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dthpc.monitor.events import read_events
from dthpc.monitor.narrate import narrate
from dthpc.monitor.progress import fold
from tests.jobs import tasks
from tests.ranks import pool
from tests.train import tasks as training


def train_own(size: int, folder: Path, attempt: int = 0, **changes: Any) -> list[training.Result]:
    return pool().run(size, tasks.train_own, str(folder), attempt, changes)


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl")[0] if event["kind"] == kind]


@pytest.mark.parametrize("data", ["Digits", "Named"])
def test_a_users_model_and_data_plug_in(tmp_path: Path, data: str) -> None:
    first, second = train_own(2, tmp_path, data={"_target_": f"tests.jobs.tasks.{data}"})
    assert first.records[-1].loss < 0.7 * first.records[0].loss
    assert all(torch.equal(value, second.parameters[name]) for name, value in first.parameters.items())
    assert "norm.running_mean" in first.parameters
    (start,) = events_of(tmp_path, "train_start")
    assert "20 steps of 10 samples" in str(narrate(start, fold([start])))


@pytest.mark.parametrize(
    "loss",
    [{"_target_": "tests.jobs.tasks.Hinge", "margin": 1.0}, {"_target_": "tests.jobs.tasks.scaled", "scale": 3.0}],
)
def test_a_users_loss_plugs_in_as_a_class_or_a_function(tmp_path: Path, loss: dict[str, Any]) -> None:
    records = train_own(2, tmp_path, loss=loss)[0].records
    assert records[-1].loss < 0.9 * records[0].loss


def test_data_needs_no_held_out_part_where_nothing_is_evaluated(tmp_path: Path) -> None:
    changes = {"data": {"_target_": "tests.jobs.tasks.TrainOnly"}, "train": {"eval_every": -1}}
    first, second = train_own(2, tmp_path, **changes)
    assert (first.outcome, first.evals) == (second.outcome, [])
    assert len(first.records) == first.step > 0


def test_running_statistics_survive_a_restart_bit_by_bit(tmp_path: Path) -> None:
    stop = {"stopper": {"_target_": "tests.train.tasks.StopAfter", "step": 5, "rank": 1}}
    whole = train_own(2, tmp_path / "whole")
    first = train_own(2, tmp_path / "cut", callbacks=stop)
    assert first[0].outcome == "preempted"
    second = train_own(2, tmp_path / "cut", 1)
    for one, other in zip(whole, second, strict=True):
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


def test_the_events_tell_the_whole_story(tmp_path: Path) -> None:
    changes = {"train": {"eval_every": 4}, "checkpoint": {"every": 2}, "monitor": {"log_every": 2}}
    pool().run(2, training.train_with, str(tmp_path), 0, changes)
    (start,) = events_of(tmp_path, "train_start")
    assert (start["step"], start["total_steps"], start["tokens_per_step"], start["resumed_from"]) == (0, 6, 80, None)
    steps = events_of(tmp_path, "step")
    assert [event["step"] for event in steps] == [1, 2, 4, 6]
    assert [event["samples"] for event in steps] == [5, 10, 20, 30]
    assert {"loss", "lr", "grad_norm", "tokens", "step_time", "tokens_per_s", "data_wait"} <= steps[0].keys()
    assert [event["step"] for event in events_of(tmp_path, "checkpoint_saved")] == [2, 4, 6]
    assert [event["step"] for event in events_of(tmp_path, "eval")] == [4, 6]
    (end,) = events_of(tmp_path, "train_end")
    assert (end["step"], end["samples"], end["lost_seconds"]) == (6, 30, 0)
    assert end["bits_per_byte"] == pytest.approx(events_of(tmp_path, "eval")[-1]["bits_per_byte"])
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_restart_is_told_and_what_it_cost(tmp_path: Path) -> None:
    stop = {"stopper": {"_target_": "tests.train.tasks.StopAfter", "step": 2, "rank": 0}}
    pool().run(2, training.train_with, str(tmp_path), 0, {"callbacks": stop})
    (stopped,) = events_of(tmp_path, "stop_requested")
    assert stopped["signal"] == "SIGUSR2"
    pool().run(2, training.train_with, str(tmp_path), 1, {})
    (restored,) = events_of(tmp_path, "checkpoint_restored")
    assert restored["step"] == stopped["step"]
    assert events_of(tmp_path, "train_start")[1]["resumed_from"] == stopped["step"]
    assert events_of(tmp_path, "train_end")[0]["lost_seconds"] == 0


def test_steps_that_a_restart_makes_again_are_told_as_lost_time(tmp_path: Path) -> None:
    breaker = {"breaker": {"_target_": "tests.train.tasks.BreakAfter", "step": 4, "rank": 0}}
    pool().run(2, training.raises, str(tmp_path), {"checkpoint": {"every": 3}, "callbacks": breaker})
    made = [event["step_time"] for event in events_of(tmp_path, "step") if event["step"] > 3]
    assert len(made) == 2
    pool().run(2, training.train_with, str(tmp_path), 1, {})
    assert events_of(tmp_path, "train_end")[0]["lost_seconds"] == pytest.approx(sum(made))


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    changes = {"checkpoint": {"every": 1, "keep": 2, "keep_every": 3}}
    pool().run(2, training.train_with, str(tmp_path), 0, changes)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000005", "step-00000006"]


def test_curves_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pool().run(1, training.train_with, str(tmp_path), 0, {"monitor": {"tensorboard": True}})
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"valid/bits_per_byte" in content


def test_a_failed_save_in_between_is_an_incident_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    kind, text = pool().run(2, tasks.error_of, str(tmp_path), 0, {"checkpoint": {"every": 5}})[0]
    incidents = events_of(tmp_path, "incident")
    assert [event["step"] for event in incidents] == [5, 10, 15]
    assert incidents[0]["what"] == "checkpoint not saved"
    assert events_of(tmp_path, "step")[-1]["step"] == 20
    assert kind
    assert "checkpoints" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": {"_target_": "tests.jobs.tasks.Missing"}},
            "model._target_=tests.jobs.tasks.Missing: cannot be imported",
        ),
        ({"model": {"_target_": "tests.jobs.tasks.Perceptron"}}, "the arguments that it takes: width, classes"),
        ({"model": {"_target_": "tests.jobs.tasks.Digits"}}, "builds a Digits"),
        ({"model": {"_target_": "dthpc.models.gpt.GPT", "vocab_size": 8, "dim": 6, "heads": 4}}, "model.dim=6"),
        ({"data": {"_target_": "tests.jobs.tasks.Hinge", "margin": 1}}, "a Hinge is no data"),
        ({"data": {"_target_": "tests.jobs.tasks.Digits", "count": 0}}, "training data set has no samples"),
        ({"data": {"_target_": "tests.jobs.tasks.Digits", "count": 5}}, "held-out data set has no samples"),
        ({"data": {"_target_": "tests.jobs.tasks.TrainOnly"}}, "TrainOnly: it has no `valid` data set"),
        ({"data": {"_target_": "tests.jobs.tasks.TrainOnly"}}, "train.eval_every=-1"),
        ({"data": {"_target_": "tests.jobs.tasks.Streamed"}}, "Streamed: its `train` is of type"),
        ({"data": {"_target_": "tests.jobs.tasks.DataOfRank"}}, "rank 0 has 20 training"),
        ({"callbacks": {"mine": {"_target_": "tests.jobs.tasks.NotACallback"}}}, "a NotACallback is no callback"),
        ({"parallel": {"dp": 3}}, "there are 2 ranks"),
        ({"parallel": {"pp": 2}}, "def pipeline_layers(self)"),
        ({"parallel": {"pp": 2, "stages": "measured"}}, "def pipeline_layers(self)"),
        ({"parallel": {"tp": 2}}, "tensor_plan(self) -> dict[str, str]"),
        (
            {"model": {"_target_": "tests.jobs.tasks.Spare", "width": 8}},
            "parallel.allow_unused=False: parameters got no gradient in the first step: spare.bias, spare.weight",
        ),
    ],
)
def test_mistakes_end_in_one_clear_message(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    kind, text = pool().run(2, tasks.error_of, str(tmp_path), 0, changes)[0]
    assert kind == "UserError"
    assert words in text


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_unused_parameters_count_as_zero_where_they_are_allowed(tmp_path: Path, zero: int) -> None:
    model = {"_target_": "tests.jobs.tasks.Spare", "width": 8}
    changes: dict[str, Any] = {"model": model, "optim": {"weight_decay": 0.0}}
    parallel = {"allow_unused": True, "zero": zero}
    ranks = train_own(2, tmp_path, **changes, parallel=parallel)
    assert [result.outcome for result in ranks] == ["finished"] * 2
    moved = training.assembled(ranks)["spare.weight"]
    start = train_own(2, tmp_path / "start", **changes, parallel=parallel, train={"steps": 1})
    assert torch.equal(moved, training.assembled(start)["spare.weight"])


@pytest.mark.parametrize("loss", ["only_sum", "no_scalar"])
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}, {"zero": 3}])
def test_a_loss_that_breaks_its_contract_is_told_in_any_layout(
    tmp_path: Path, loss: str, parallel: dict[str, Any]
) -> None:
    changes = {"loss": {"_target_": f"tests.train.tasks.{loss}"}, "parallel": parallel}
    *others, (kind, text, _) = pool().run(2, training.raises, str(tmp_path), changes)
    assert kind == "UserError"
    assert text.startswith(f"loss._target_=tests.train.tasks.{loss}: it")
    # Other stages have no loss: they lose their neighbour.
    for other, its_text, _ in others:
        assert other
        assert "pp" in parallel or its_text[:90] == text[:90]


def test_a_vocabulary_smaller_than_the_datas_is_refused(tmp_path: Path) -> None:
    changes = {"model": {"vocab_size": 31}}
    kind, text, _ = pool().run(1, training.raises, str(tmp_path), changes)[0]
    assert kind == "UserError"
    assert "model.vocab_size=31: the data has 32 different tokens" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"dim": 32}}, "(32,) here"),
        ({"data": {"fingerprint": "other text"}}, "other text"),
    ],
)
def test_a_checkpoint_of_another_model_or_text_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    pool().run(1, training.train_with, str(tmp_path), 0, {"train": {"steps": 1}})
    kind, text, _ = pool().run(1, training.raises, str(tmp_path), changes)[0]
    assert kind.startswith("UserError")
    assert words in text


def test_other_text_is_taken_when_the_change_was_accepted(tmp_path: Path) -> None:
    pool().run(1, training.train_with, str(tmp_path), 0, {"train": {"steps": 1}})
    changes = {"data": {"fingerprint": "other text"}, "run": {"on_change": "accept"}}
    assert pool().run(1, training.train_with, str(tmp_path), 1, changes)[0].outcome == "finished"
