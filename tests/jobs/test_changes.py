from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.jobs.changes import find_changes, setup_of
from dthpc.monitor.events import read_events
from dthpc.monitor.narrate import narrate
from dthpc.monitor.progress import Progress
from dthpc.parallel.layout import Layout
from dthpc.rundir import RunDir, write_json
from tests.ranks import pool
from tests.train import tasks


def train(size: int, folder: Path, attempt: int, **changes: Any) -> list[str]:
    """What an attempt says of itself; it is asked to stop at the step that its number tells."""
    stop = {"stopper": {"_target_": "tests.train.tasks.StopAfter", "step": attempt + 1, "rank": 0}}
    pool().run(size, tasks.train_with, str(folder), attempt, {"callbacks": stop, **changes})
    events, *_ = read_events(RunDir(folder).events)
    changed = [event for event in events if event["kind"] == "changed" and event["attempt"] == attempt]
    return [narrate(event, Progress()) or "" for event in changed]


def test_an_attempt_with_another_layout_or_other_ways_to_talk_says_so(tmp_path: Path) -> None:
    assert train(2, tmp_path, 0) == []
    assert train(2, tmp_path, 1) == []
    assert train(2, tmp_path, 2, parallel={"tp": 2}) == ["layout changed since attempt 1: dp 2 → 1, tp 1 → 2"]
    assert train(2, tmp_path, 3, comm={"shared_memory": False, "timeout_s": 60}) == [
        "layout changed since attempt 2: dp 1 → 2, tp 2 → 1",
        "communication changed since attempt 2: comm.shared_memory auto → false",
    ]
    assert train(1, tmp_path, 4, comm={"shared_memory": False}, train={"micro_batch": 2}) == [
        "layout changed since attempt 3: ranks 2 → 1, dp 2 → 1",
        "configuration changed since attempt 3: train.micro_batch none → 2",
    ]


def told(before: Layout, after: Layout, tmp_path: Path, backends: tuple[str, str] = ("gloo", "gloo")) -> list[str]:
    run, config = RunDir(tmp_path), tasks.make_config()
    write_json(run.attempt(0).setup, setup_of(before, config, backends[0], {}))
    return [change.text() for change in find_changes(run, 1, setup_of(after, config, backends[1], {}))]


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (Layout(tp=2), Layout(tp=2), None),
        (Layout(replicate=4), Layout(shard=4, zero=1), "zero 0 → 1"),
        (Layout(shard=4, zero=1), Layout(replicate=2, shard=2, zero=1), "dp 4 → 4 (2x2)"),
        (Layout(replicate=2), Layout(tp=2, sequence_parallel=True), "dp 2 → 1, tp 1 → 2+sp"),
        (Layout(pp=2, chunks=2, schedule="zbv"), Layout(pp=2), "pp 2 (zbv, 2 chunks) → 2 (1f1b)"),
    ],
)
def test_layouts_are_compared_by_what_came_of_them(
    before: Layout, after: Layout, changes: str | None, tmp_path: Path
) -> None:
    expected = [] if changes is None else [f"layout changed since attempt 0: {changes}"]
    assert told(before, after, tmp_path) == expected


def test_another_back_end_is_told_whoever_chose_it(tmp_path: Path) -> None:
    (line,) = told(Layout(), Layout(), tmp_path, ("gloo", "cpu:mpi4py"))
    assert line == "communication changed since attempt 0: backend gloo → cpu:mpi4py"


def test_attempts_that_left_no_record_are_passed_over(tmp_path: Path) -> None:
    run, setup = RunDir(tmp_path), setup_of(Layout(), tasks.make_config(), "gloo", {})
    run.attempt(0).path.mkdir(parents=True)
    assert list(find_changes(run, 1, setup)) == []
    write_json(run.attempt(1).setup, setup)
    run.attempt(2).path.mkdir(parents=True)
    write_json(run.attempt(3).setup, setup_of(Layout(tp=2), tasks.make_config(), "gloo", {}))
    assert [
        change.since for change in find_changes(run, 3, setup_of(Layout(tp=4), tasks.make_config(), "gloo", {}))
    ] == [1]
