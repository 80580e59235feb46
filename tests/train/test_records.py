from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.context import RankContext
from dthpc.data.images import Digits
from dthpc.models.losses import next_token
from dthpc.monitor.events import EventLog, read_events
from dthpc.monitor.tensorboard import ScalarWriter
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.memory import StateBytes
from dthpc.parallel.mesh import make_mesh
from dthpc.placement.identity import RankIdentity
from dthpc.rundir import RunDir
from dthpc.train.callbacks import CheckpointRecord, EvalRecord, MemoryRecord, StepRecord
from dthpc.train.header import Header
from dthpc.train.loop import Training
from dthpc.train.records import EventRecorder, TensorBoard
from dthpc.train.saver import Saver
from dthpc.train.state import TrainState
from tests.train.tasks import Sequences, make_config


def make_training(folder: Path, **precision: str) -> Training:
    """A training of 10 steps that has made 4, as a callback sees it."""
    run, config = RunDir(folder), make_config(train={"steps": 10}, precision=precision)
    model = parallelize(nn.Linear(3, 2), next_token, make_mesh(Layout(), "cpu"), config, torch.device("cpu"))
    return Training(
        config=config,
        context=RankContext(RankIdentity(0, 1, 0, 1, 0, 1, "here", 0), run, torch.device("cpu")),
        data=Sequences(),
        model=model,
        optimizer=torch.optim.SGD([piece.tensor for piece in model.shards.pieces], lr=0.1),
        header=Header(None),
        saver=Saver(run, 0, 5, 2, 0, {}, True),
        state=TrainState(step=4, samples=20),
        resumed_from=2,
    )


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return make_training(tmp_path)


def recorder(training: Training, every: int = 1, bigram: float | None = 3.4) -> EventRecorder:
    return EventRecorder(EventLog(training.context.run.events), every, bigram)


def told(training: Training, kind: str | None = None) -> list[dict[str, Any]]:
    events, _ = read_events(training.context.run.events)
    return [{k: v for k, v in event.items() if k != "time"} for event in events if kind in (None, event["kind"])]


def step(number: int, loss: float = 2.0, targets: int = 10, seconds: float = 0.5, wait: float = 0.1) -> StepRecord:
    return StepRecord(number, loss, 0.01 * number, 1.0 + number, targets, 5 * number, seconds, wait)


def test_the_start_says_how_much_work_there_is(training: Training) -> None:
    recorder(training).on_train_start(training)
    assert told(training) == [
        {
            "kind": "train_start",
            "step": 4,
            "total_steps": 10,
            "unit": "token",
            "samples_per_step": 5,
            "tokens_per_step": 5 * 16,
            "params": 3 * 2 + 2,
            "resumed_from": 2,
            "layout": "dp=1",
            "precision": "fp32",
            "stored": "float32",
        }
    ]


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        (Sequences(), "token"),
        (Digits(), "image"),
        (SimpleNamespace(train=[], valid=[]), "target"),
        (SimpleNamespace(vocab_size=9, unit="frame"), "frame"),
    ],
)
def test_targets_are_called_what_the_data_are_made_of(data: Any, unit: str, training: Training) -> None:
    training.data = data
    recorder(training).on_train_start(training)
    (start,) = told(training)
    assert (start["unit"], start["samples_per_step"]) == (unit, 5)
    assert start["tokens_per_step"] == (80 if unit == "token" else None)


def test_the_start_tells_formats(tmp_path: Path) -> None:
    training = make_training(tmp_path, compute="bf16", parameters="compute")
    recorder(training).on_train_start(training)
    (start,) = told(training)
    assert (start["precision"], start["stored"]) == ("bf16", "bfloat16")


def test_memory_is_told_as_measured_and_by_formula_and_again_at_the_end(training: Training) -> None:
    log = recorder(training)
    log.on_memory(training, MemoryRecord(5, StateBytes(32, 64, 128), StateBytes(32, 64, 100)))
    assert told(training) == [
        {
            "kind": "memory",
            "step": 5,
            "rank": 0,
            "parameters": 32,
            "gradients": 64,
            "optimizer": 128,
            "expected": {"parameters": 32, "gradients": 64, "optimizer": 100},
        }
    ]
    log.on_train_end(training)
    assert told(training, "train_end")[0]["state_bytes"] == 32 + 64 + 128


def test_a_loss_scale_is_told_with_what_it_cost_and_only_where_there_is_one(tmp_path: Path) -> None:
    names = {"loss_scale", "skipped_steps", "overflows"}
    plain = make_training(tmp_path / "fp32")
    log = recorder(plain)
    log.on_step(plain, step(5))
    log.on_train_end(plain)
    assert not any(names & event.keys() for event in told(plain))
    scaled = make_training(tmp_path / "fp16", compute="fp16")
    log = recorder(scaled)
    log.on_step(scaled, replace(step(5), loss_scale=1024.0, skipped_steps=2, overflows=2))
    scaled.model.scaler.update(False)
    log.on_train_end(scaled)
    first, end = told(scaled)
    assert [first[name] for name in ("loss_scale", "skipped_steps", "overflows")] == [1024.0, 2, 2]
    assert [end[name] for name in ("loss_scale", "skipped_steps", "overflows")] == [32768.0, 1, 1]


def test_the_first_step_every_few_and_the_last_are_written(training: Training) -> None:
    log = recorder(training, every=3)
    for number in range(5, 11):
        log.on_step(training, step(number))
    assert [event["step"] for event in told(training, "step")] == [5, 6, 9, 10]


def test_a_record_speaks_for_all_steps_since_the_one_before(training: Training) -> None:
    log = recorder(training, every=3)
    log.on_step(training, step(4))
    for number, loss, targets, seconds, wait in ((5, 1.0, 10, 0.5, 0.0), (6, 4.0, 30, 1.5, 0.5)):
        log.on_step(training, step(number, loss, targets, seconds, wait))
    event = told(training, "step")[-1]
    assert event["loss"] == pytest.approx((1.0 * 10 + 4.0 * 30) / 40)
    assert (event["tokens"], event["step_time"], event["tokens_per_s"], event["data_wait"]) == (40, 1.0, 20.0, 0.25)
    # What holds at one moment is that of the last step.
    assert (event["step"], event["lr"], event["grad_norm"], event["samples"]) == (6, 0.06, 7.0, 30)


def test_each_target_is_told_once(training: Training) -> None:
    log = recorder(training, every=4)
    for number in range(1, 11):
        log.on_step(training, step(number, targets=number))
    assert sum(event["tokens"] for event in told(training, "step")) == sum(range(1, 11))


def test_a_step_that_took_no_time_has_a_finite_rate(training: Training) -> None:
    recorder(training).on_step(training, step(5, seconds=0.0))
    assert told(training)[0]["tokens_per_s"] == pytest.approx(10 / 1e-9)


def test_an_evaluation_comes_with_its_baseline(training: Training) -> None:
    recorder(training).on_eval(training, EvalRecord(4, 2.5, 3.3, 700, 0.25, False))
    assert told(training) == [
        {
            "kind": "eval",
            "step": 4,
            "loss": 2.5,
            "bits_per_byte": 3.3,
            "bigram_bits_per_byte": 3.4,
            "tokens": 700,
            "whole": False,
            "seconds": 0.25,
        }
    ]


def test_what_is_not_known_is_null_and_not_left_out(training: Training) -> None:
    log = recorder(training, bigram=None)
    log.on_eval(training, EvalRecord(4, 2.5, None, 700, 0.25, True))
    log.on_checkpoint(training, CheckpointRecord(4, Path("/runs/a/checkpoints/step-00000004"), 1.5, None))
    first, second = told(training)
    assert (first["bits_per_byte"], first["bigram_bits_per_byte"]) == (None, None)
    assert second == {
        "kind": "checkpoint_saved",
        "step": 4,
        "path": "/runs/a/checkpoints/step-00000004",
        "seconds": 1.5,
        "bytes": None,
    }


def test_stops_and_incidents_carry_the_step_at_which_they_came(training: Training) -> None:
    log = recorder(training)
    log.on_stop(training, "SIGUSR2")
    log.on_incident(training, "checkpoint not saved", "No space left on device")
    assert told(training) == [
        {"kind": "stop_requested", "signal": "SIGUSR2", "step": 4},
        {"kind": "incident", "what": "checkpoint not saved", "why": "No space left on device", "step": 4},
    ]


def test_the_end_adds_up_all_steps_evaluations_and_checkpoints(training: Training) -> None:
    log = recorder(training, every=3)
    for number in range(5, 11):
        log.on_step(training, step(number))
    for _ in range(2):
        log.on_eval(training, EvalRecord(10, 2.5, 3.3, 700, 0.25, True))
    log.on_checkpoint(training, CheckpointRecord(10, Path("c"), 1.5, 100))
    training.last_step, training.last_eval = step(10, loss=1.25), EvalRecord(10, 2.5, 3.3, 700, 0.25, True)
    log.on_train_end(training)
    (end,) = told(training, "train_end")
    assert (end["loss"], end["eval_loss"], end["bits_per_byte"], end["bigram_bits_per_byte"]) == (1.25, 2.5, 3.3, 3.4)
    assert end["step_seconds"] == pytest.approx(6 * 0.5)
    assert end["data_wait_seconds"] == pytest.approx(6 * 0.1)
    assert (end["eval_seconds"], end["checkpoint_seconds"]) == (0.5, 1.5)
    assert end["tokens_per_s"] == pytest.approx(20.0)
    assert end["checkpoints"] == str(training.context.run.checkpoints)


def test_an_attempt_that_only_evaluates_ends_without_a_pace(training: Training) -> None:
    recorder(training).on_train_end(training)
    (end,) = told(training)
    assert (end["loss"], end["tokens_per_s"], end["step_time"], end["step_seconds"]) == (None, None, None, 0.0)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of every curve, read as TensorBoard does: records of a length, its checksum, data and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.fixture
def board(tmp_path: Path) -> TensorBoard:
    pytest.importorskip("tensorboardX")
    return TensorBoard(ScalarWriter(tmp_path / "tensorboard"), every=2)


def test_curves_have_a_point_every_few_steps(training: Training, board: TensorBoard) -> None:
    for number in range(1, 6):
        board.on_step(training, step(number, loss=float(number), wait=0.25))
    board.on_train_end(training)
    drawn = curves(training.context.run.tensorboard)
    assert drawn.pop("train/learning_rate") == [(2, pytest.approx(0.02)), (4, pytest.approx(0.04))]
    assert drawn == {
        "train/loss": [(2, 2.0), (4, 4.0)],
        "train/gradient_norm": [(2, 3.0), (4, 5.0)],
        "speed/step_seconds": [(2, 0.5), (4, 0.5)],
        "speed/tokens_per_second": [(2, 20.0), (4, 20.0)],
        "speed/data_wait_seconds": [(2, 0.25), (4, 0.25)],
    }


def test_the_loss_scale_is_drawn_and_an_overflow_has_no_gradient_norm(training: Training, board: TensorBoard) -> None:
    board.on_step(training, replace(step(2), grad_norm=float("inf"), loss_scale=8.0, skipped_steps=1, overflows=1))
    board.on_train_end(training)
    drawn = curves(training.context.run.tensorboard)
    assert "train/gradient_norm" not in drawn
    assert drawn["scaling/loss_scale"] == [(2, 8.0)]
    assert drawn["scaling/skipped_steps"] == [(2, 1.0)]
    assert drawn["train/loss"] == [(2, 2.0)]


def test_bits_per_byte_are_drawn_where_they_are_known(training: Training, board: TensorBoard) -> None:
    board.on_eval(training, EvalRecord(3, 2.5, None, 700, 0.25, True))
    board.on_eval(training, EvalRecord(4, 2.25, 3.5, 700, 0.25, True))
    board.on_stop(training, "SIGTERM")
    drawn = curves(training.context.run.tensorboard)
    assert drawn == {"valid/loss": [(3, 2.5), (4, 2.25)], "valid/bits_per_byte": [(4, 3.5)]}


def test_a_training_that_draws_nothing_leaves_no_file(training: Training, board: TensorBoard) -> None:
    board.on_step(training, step(1))
    board.on_train_end(training)
    assert not training.context.run.tensorboard.exists()
