from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from dthpc.watch.report import (
    ACTIVE,
    ENDED,
    STATES,
    WAITING,
    AttemptReport,
    CheckpointReport,
    FailureReport,
    PendingReport,
    RunReport,
)
from dthpc.watch.survey import survey
from dthpc.watch.view import STYLES
from tests.watch.records import Records


def through_json(report: RunReport) -> dict[str, object]:
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert isinstance(value, dict)
    return value


def test_every_state_is_waiting_at_work_or_over() -> None:
    assert len(set(STATES)) == len(STATES) == len(WAITING) + len(ACTIVE) + len(ENDED)
    assert set(STYLES) <= set(STATES)


@pytest.mark.parametrize("state", STATES)
def test_only_what_is_over_has_ended(state: str) -> None:
    assert RunReport("a", "/runs/a", state).ended is (state in ENDED)


def test_a_report_of_which_nothing_is_known_still_has_every_field() -> None:
    value = through_json(RunReport("a", "/runs/a"))
    assert value.keys() == {item.name for item in fields(RunReport)}
    assert (value["state"], value["awaits_start"], value["attempts"]) == ("lost", False, [])
    assert all(value[name] is None for name in ("step", "loss", "checkpoint", "failure", "pending", "summary"))


def test_inner_reports_are_told_with_all_their_fields() -> None:
    value = through_json(
        RunReport(
            "a",
            "/runs/a",
            pending=PendingReport("Priority", 5.0),
            checkpoint=CheckpointReport(10, "/c", "quick"),
            attempts=[AttemptReport(0, nodes=["n1", "n2"]), AttemptReport(1)],
            failure=FailureReport(1, 3, "crash", log_tail=["a", "b"]),
        )
    )
    assert value["pending"] == {"reason": "Priority", "start": 5.0}
    assert value["checkpoint"] == {"step": 10, "path": "/c", "verified": "quick"}
    assert isinstance(value["attempts"], list)
    assert [set(each) for each in value["attempts"]] == [{item.name for item in fields(AttemptReport)}] * 2
    assert isinstance(value["failure"], dict)
    assert value["failure"]["log_tail"] == ["a", "b"]


def test_numbers_that_json_does_not_have_are_text_at_any_depth() -> None:
    nan, endless = float("nan"), float("inf")
    report = RunReport("a", "/runs/a", loss=nan, eta_s=endless, eval_loss=-endless)
    report.summary = {"loss": nan, "inner": {"rates": [1.0, endless, {"x": nan}]}, "step": 3}
    report.attempts = [AttemptReport(0, started=nan)]
    value = through_json(report)
    assert (value["loss"], value["eta_s"], value["eval_loss"]) == ("nan", "inf", "-inf")
    assert value["summary"] == {"loss": "nan", "inner": {"rates": [1.0, "inf", {"x": "nan"}]}, "step": 3}


def test_telling_a_report_does_not_change_it() -> None:
    report = RunReport("a", "/runs/a", summary={"loss": float("inf")})
    report.to_json()
    assert report.summary == {"loss": float("inf")}


@pytest.mark.parametrize(
    ("started", "ended", "took"),
    [
        (None, None, None),
        (None, 50.0, None),
        (10.0, None, 90.0),
        (10.0, 50.0, 40.0),
        (10.0, 10.0, 0.0),
        (0.0, 5.0, 5.0),
    ],
)
def test_an_attempt_takes_until_its_end_or_until_now(
    started: float | None, ended: float | None, took: float | None
) -> None:
    assert AttemptReport(0, started=started, ended=ended).duration(100.0) == took


def test_reports_share_no_list() -> None:
    first, second = RunReport("a", "/runs/a"), RunReport("b", "/runs/b")
    first.attempts.append(AttemptReport(0))
    first.rejected.append("x")
    first.unreadable.append("y")
    assert (second.attempts, second.rejected, second.unreadable) == ([], [], [])


def test_the_report_of_a_real_run_is_json(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().steps(10, 120)
    records.write("step", step=130, loss=float("nan"), step_time=0.4, tokens_per_s=1.0, samples=1)
    records.fail(1, "ValueError: x", at=1.0, log="last words\n").end("crash", "stop", "it broke")
    value = through_json(survey([records.run], None, detail=True)[0])
    assert (value["state"], value["step"], value["loss"]) == ("failed", 130, "nan")
