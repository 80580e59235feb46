from __future__ import annotations

from typing import Any

import pytest

from dthpc.train.callbacks import StepRecord
from dthpc.train.summary import Totals, lost_seconds


def test_the_mean_loss_weighs_steps_by_their_targets() -> None:
    totals = Totals()
    for loss, targets in ((2.0, 10), (4.0, 30)):
        totals.add(StepRecord(1, loss, 0.1, 1.0, targets, 5, seconds=0.5, data_wait=0.1))
    assert totals.loss == pytest.approx(3.5)
    assert (totals.steps, totals.targets, totals.seconds, totals.data_wait) == (2, 40, 1.0, pytest.approx(0.2))


def start(time: float, resumed_from: int | None) -> dict[str, Any]:
    return {"time": time, "kind": "train_start", "step": resumed_from or 0, "resumed_from": resumed_from}


def steps(time: float, step: int, each: float) -> dict[str, Any]:
    return {"time": time, "kind": "step", "step": step, "step_time": each}


def test_lost_time_is_that_of_the_steps_after_the_checkpoint_that_was_resumed() -> None:
    events = [
        start(10, None),
        steps(11, 1, 1.0),
        steps(19, 5, 2.0),
        {"time": 20, "kind": "checkpoint_saved", "step": 5},
        steps(35, 10, 3.0),
        start(9000, 5),
        steps(9020, 10, 4.0),
        {"time": 9021, "kind": "checkpoint_saved", "step": 10},
        start(20000, 10),
    ]
    assert lost_seconds(events) == 5 * 3.0


def test_a_record_that_reaches_over_the_checkpoint_counts_in_part() -> None:
    assert lost_seconds([start(0, None), steps(20, 10, 2.0), start(30, 7)]) == 3 * 2.0


def test_several_resumes_from_one_checkpoint_count_each_step_once_and_no_more_than_the_wall_time() -> None:
    events = [start(0, None), steps(5, 5, 1.0), {"time": 5, "kind": "checkpoint_saved", "step": 5}, steps(10, 10, 1.0)]
    for time in (20, 30, 40):
        events += [start(time, 5), steps(time + 2, 7, 1.0)]
    events += [start(50, 5), steps(55, 10, 1.0)]
    assert lost_seconds(events) == 5 + 3 * 2
    assert lost_seconds(events) < 55


def test_an_older_checkpoint_takes_steps_of_several_attempts_back() -> None:
    events = [start(0, None), steps(10, 10, 1.0), start(20, 8), steps(26, 12, 1.5), start(30, 6), start(40, 6)]
    assert lost_seconds(events) == 2 + (2 + 4 * 1.5)


def test_a_restart_from_the_beginning_loses_every_step_but_not_the_time_away() -> None:
    events = [start(10, None), steps(22, 6, 2.0), start(86400, None)]
    assert lost_seconds(events) == 12
    assert lost_seconds(events[:2]) == 0
    assert lost_seconds([start(10, None), start(70, None)]) == 0
