from __future__ import annotations

import pytest

from dthpc.train.callbacks import StepRecord
from dthpc.train.summary import Totals, lost_seconds


def test_the_mean_loss_weighs_steps_by_their_targets() -> None:
    totals = Totals()
    for loss, targets in ((2.0, 10), (4.0, 30)):
        totals.add(StepRecord(1, loss, 0.1, 1.0, targets, 5, seconds=0.5, data_wait=0.1))
    assert totals.loss == pytest.approx(3.5)
    assert (totals.steps, totals.targets, totals.seconds, totals.data_wait) == (2, 40, 1.0, pytest.approx(0.2))


def test_lost_time_runs_from_the_checkpoint_that_was_resumed_until_training_again() -> None:
    events = [
        {"time": 0.0, "kind": "attempt_start"},
        {"time": 10.0, "kind": "train_start", "resumed_from": None},
        {"time": 50.0, "kind": "checkpoint_saved", "step": 5},
        {"time": 90.0, "kind": "checkpoint_saved", "step": 10},
        {"time": 130.0, "kind": "train_start", "resumed_from": 5},
        {"time": 160.0, "kind": "checkpoint_saved", "step": 10},
        {"time": 165.0, "kind": "train_start", "resumed_from": 10},
    ]
    assert lost_seconds(events) == 80 + 5


def test_a_restart_from_the_beginning_loses_everything_since_the_first_start() -> None:
    events = [
        {"time": 10.0, "kind": "train_start", "resumed_from": None},
        {"time": 70.0, "kind": "train_start", "resumed_from": None},
    ]
    assert lost_seconds(events) == 60
    assert lost_seconds(events[:1]) == 0
