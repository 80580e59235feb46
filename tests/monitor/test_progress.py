from __future__ import annotations

from typing import Any

import pytest

from dthpc.monitor.progress import Progress, fold


def at(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, "attempt": 0, **fields}


def training(steps: int, total: int = 100, pace: float = 2.0) -> list[dict[str, Any]]:
    events = [at(0.0, "attempt_start"), at(1.0, "train_start", step=0, total_steps=total)]
    return events + [at(1.0 + pace * step, "step", step=step, loss=3.0, step_time=0.5) for step in range(1, steps + 1)]


def test_eta_follows_the_clock_between_records_not_the_step_time() -> None:
    progress = fold(training(steps=10))
    assert progress.seconds_per_step() == pytest.approx(2.0)
    assert progress.eta(now=21.0) == pytest.approx(180.0)
    assert progress.eta(now=31.0) == pytest.approx(170.0)


def test_one_record_gives_the_pace_of_its_own_step_time() -> None:
    assert fold(training(steps=1)).eta(now=3.0) == pytest.approx(99 * 0.5)


@pytest.mark.parametrize(
    "last",
    [
        at(22.0, "attempt_end", decision="requeue"),
        at(22.0, "stop_requested", signal="SIGTERM"),
        at(22.0, "train_end", step=10),
        at(22.0, "attempt_start"),
    ],
)
def test_there_is_no_eta_when_it_is_not_training(last: dict[str, Any]) -> None:
    assert fold([*training(steps=10), last]).eta(now=23.0) is None


def test_there_is_no_eta_without_a_total() -> None:
    assert fold([at(1.0, "step", step=1, step_time=1.0), at(2.0, "step", step=2, step_time=1.0)]).eta(2.0) is None


def test_a_silent_run_is_stalled_and_has_no_eta() -> None:
    progress = fold(training(steps=10))
    assert progress.stalled_for(now=21.0 + 59) is None
    assert progress.stalled_for(now=21.0 + 61) == pytest.approx(61.0)
    assert progress.eta(now=21.0 + 61) is None


def test_a_slow_run_is_not_stalled_within_its_own_rhythm() -> None:
    assert fold(training(steps=3, pace=50.0)).stalled_for(now=151.0 + 400) is None


def test_a_restart_starts_from_the_step_it_resumed_at() -> None:
    events = [
        *training(steps=10),
        at(30.0, "attempt_end", decision="requeue", cause="preempted"),
        {**at(200.0, "attempt_start", job_id=12), "attempt": 1},
        {**at(201.0, "train_start", step=8, total_steps=100, resumed_from=8), "attempt": 1},
    ]
    progress = fold(events)
    assert (progress.attempt, progress.step, progress.resumed_from, progress.job_id) == (1, 8, 8, "12")
    assert progress.attempt_end is None
    assert progress.eta(202.0) is None


def test_a_checkpoint_proves_its_step() -> None:
    progress = fold([*training(steps=10), at(22.0, "checkpoint_saved", step=13)])
    assert (progress.step, progress.checkpoint_step) == (13, 13)


def test_non_finite_numbers_are_kept_as_such() -> None:
    loss = fold([at(1.0, "step", step=1, loss="nan")]).loss
    assert loss is not None
    assert loss != loss


def test_fields_of_the_wrong_type_do_not_break_it() -> None:
    progress = Progress()
    progress.apply({"kind": "step", "step": "x", "loss": [1], "time": None, "attempt": {}})
    assert progress.step is None
    assert progress.loss is None


def test_a_kind_it_does_not_know_is_passed_over() -> None:
    assert fold([at(5.0, "apply"), at(6.0, "no such kind")]).last_time == 6.0


def test_before_its_first_step_an_attempt_has_nothing_to_save() -> None:
    start = [at(1.0, "attempt_start"), at(2.0, "train_start", step=40, total_steps=100, resumed_from=40)]
    assert not fold([*start, at(3.0, "stop_requested", signal="SIGTERM", step=40)]).trains
    progress = fold([*start, at(3.0, "stop_requested", signal="SIGTERM", step=43)])
    assert (progress.trains, progress.step) == (True, 43)
    assert fold([*start, at(3.0, "step", step=41)]).trains
