from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from dthpc.monitor.units import clock
from dthpc.watch.report import STATES, AttemptReport, CheckpointReport, FailureReport, PendingReport, RunReport
from dthpc.watch.view import failure_lines, hint, print_detail, print_overview

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the runs of the one in which the command is typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def report(root: Path, state: str = "running", name: str = "a", **facts: object) -> RunReport:
    return RunReport(name, str(root / name), state, **facts)  # type: ignore[arg-type]


def overview(*reports: RunReport) -> list[list[str]]:
    """The words of each line of the table."""
    out = io.StringIO()
    print_overview(out, list(reports))
    return [line.split() for line in out.getvalue().splitlines()]


def detail(shown: RunReport) -> dict[str, str]:
    """The facts on the screen of one run, by label."""
    out = io.StringIO()
    print_detail(out, shown, NOW)
    rows = [line.split("  ", 1) for line in out.getvalue().split("\n\n")[0].splitlines()]
    return {label: text.strip() for label, text in rows}


def on_terminal(columns: int, show: Callable[[TextIO], None]) -> str:
    """What is shown on a terminal of that width."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(side, "w", encoding="utf-8") as out:
        show(out)
    text = b""
    with contextlib.suppress(OSError):  # the end of what a closed terminal has to give
        while data := os.read(main, 65536):
            text += data
    os.close(main)
    return text.decode().replace("\r\n", "\n")


def test_the_table_shows_what_is_known_and_leaves_out_the_rest(root: Path) -> None:
    known = report(
        root,
        step=120,
        total_steps=200,
        loss=0.8333,
        bits_per_byte=3.1,
        tokens_per_s=20_000.0,
        eta_s=90.0,
        attempts=[AttemptReport(0), AttemptReport(1)],
        job_id="77",
        checkpoint=CheckpointReport(100, "/c", "quick"),
    )
    header, first, second = overview(known, report(root, "lost", "b"))
    assert header == ["RUN", "STATE", "STEP", "LOSS", "BITS/BYTE", "TOK/S", "ETA", "ATTEMPTS", "JOB", "CHECKPOINT"]
    assert first == ["a", "running", "120/200", "0.833", "3.100", "20.0k", "1m", "30s", "2", "77", "100"]
    assert second == ["b", "lost", "0"]


def test_the_pace_of_what_is_no_token_says_of_what(root: Path) -> None:
    shown = report(root, "running", unit="image", tokens_per_s=1200.0, step_time=0.4)
    assert "1.20k images" in " ".join(overview(shown)[1])
    assert detail(shown)["throughput"] == "1.20k images/s, 400 ms a step"


def test_a_run_that_is_over_has_no_pace(root: Path) -> None:
    header, _ = overview(report(root, "stopped", tokens_per_s=20_000.0))
    assert "TOK/S" not in header


def test_a_finished_run_needs_no_reason_and_a_disagreement_is_always_told(root: Path) -> None:
    _, good = overview(report(root, "finished", why="the run is finished"))
    assert good == ["a", "finished", "0"]
    _, odd = overview(report(root, "finished", why="the run is finished", conflict="Slurm says FAILED"))
    assert odd[-3:] == ["Slurm", "says", "FAILED"]
    _, bad = overview(report(root, "failed", why="rank 1 broke", conflict="odd", unreadable=["x: denied", "y"]))
    assert " ".join(bad[3:]) == "rank 1 broke; odd; x: denied"


def test_a_reason_of_many_lines_is_one_short_line_in_the_table_and_whole_below(root: Path) -> None:
    why = "rank 1 failed: ValueError: a hole\n" + "\n".join(f"  shard {number}" for number in range(40))
    out = io.StringIO()
    shown = report(root, "failed", why=why, attempts=[AttemptReport(0, started=NOW - 9, ended=NOW, reason=why)])
    print_overview(out, [shown])
    header, row = out.getvalue().splitlines()
    told = row[header.index("WHY") :]
    assert told.startswith("rank 1 failed: ValueError: a hole shard 0 shard 1")
    assert told.endswith("...")  # an ellipsis, to a pipe that takes ASCII alone
    assert len(told) <= 102
    assert detail(shown)["state"].endswith("shard 38 shard 39")
    assert len(attempts(root, "failed", *shown.attempts)) == 2


def test_a_waiting_job_says_when_it_is_expected_to_start(root: Path) -> None:
    waiting = report(root, "pending", why="waits in the queue (Priority)", pending=PendingReport("Priority", NOW))
    assert " ".join(overview(waiting)[1]).endswith(f"waits in the queue (Priority); expected to start {clock(NOW)}")
    assert detail(waiting)["start"] == f"expected {clock(NOW)}"
    waiting.pending = PendingReport("Priority")
    assert "start" not in detail(waiting)


def test_a_narrow_terminal_has_the_reasons_below_the_table(root: Path) -> None:
    reports = [report(root, "failed", why="the data has a hole"), report(root, "finished", "b")]
    narrow = on_terminal(80, lambda out: print_overview(out, reports))
    assert "WHY" not in narrow
    assert narrow.splitlines()[-1].strip() == "a: the data has a hole"
    assert "WHY" in on_terminal(160, lambda out: print_overview(out, reports))


def test_colours_are_for_terminals_alone(root: Path) -> None:
    out = io.StringIO()
    print_overview(out, [report(root, state, state) for state in STATES])
    assert "\x1b" not in out.getvalue()


def test_one_run_tells_what_is_known_of_it(root: Path) -> None:
    shown = report(
        root,
        kind="slurm",
        job_id="77",
        job_state="RUNNING",
        step=120,
        total_steps=200,
        eta_s=90.0,
        loss=0.83333,
        eval_step=100,
        eval_loss=2.5,
        bits_per_byte=3.1,
        bigram_bits_per_byte=3.4,
        tokens_per_s=20_000.0,
        step_time=0.4,
        updated=NOW - 5,
        checkpoint=CheckpointReport(100, str(root / "a/checkpoints/step-00000100"), "full"),
    )
    facts = detail(shown)
    assert facts["held-out"].startswith("2.5000 at step 100, 3.100 bits per byte")
    assert "3.400" in facts.pop("held-out")
    assert facts == {
        "run": "a",
        "state": "running",
        "job": "77 (RUNNING)",
        "step": "120/200",
        "ETA": "1m 30s",
        "loss": "0.8333 training",
        "throughput": "20.0k tokens/s, 400 ms a step",
        "last news": f"5.0 s ago ({clock(NOW - 5)})",
        "folder": "runs/a",
        "checkpoint": "runs/a/checkpoints/step-00000100",
        "verified": "step 100, every checksum",
        "next": "follow it: python -m dthpc.status a --watch",
    }


def test_of_a_run_without_records_nothing_is_made_up(root: Path) -> None:
    assert detail(report(root, "cancelled")) == {
        "run": "a",
        "state": "cancelled",
        "folder": "runs/a",
        "checkpoint": "none that verifies",
        "next": "the same command with run.name=a goes on from the start",
    }
    assert detail(report(root))["ETA"] == "not known"


def test_a_quick_look_at_a_checkpoint_says_that_it_was_one(root: Path) -> None:
    shown = report(root, checkpoint=CheckpointReport(5, "/c", "quick"), rejected=["step-00000010: damaged"])
    facts = detail(shown)
    assert facts["verified"] == "step 5, by names and sizes (--verify reads every byte)"
    assert facts["rejected"] == "step-00000010: damaged"


def test_local_runs_have_processes_and_no_job(root: Path) -> None:
    assert detail(report(root, kind="local", job_id="4711"))["job"] == "local processes"
    assert detail(report(root, kind="slurm", job_id="7"))["job"] == "7"
    assert detail(report(root, kind="allocation"))["job"] == "allocation"


def attempts(root: Path, state: str, *found: AttemptReport) -> list[str]:
    out = io.StringIO()
    print_detail(out, report(root, state, attempts=list(found)), NOW)
    return out.getvalue().split("\n\n")[1].splitlines()


def test_attempts_are_a_table_in_their_order(root: Path) -> None:
    first = AttemptReport(
        0, "7", nodes=[f"n{n}" for n in range(6)], started=NOW - 100, ended=NOW - 40, cause="preempted",
        decision="requeue", reason="preempted by Slurm",
    )  # fmt: skip
    header, *lines = attempts(root, "running", first, AttemptReport(1, "7", started=NOW - 30))
    assert header.split()[:5] == ["ATTEMPT", "STARTED", "TOOK", "NODES", "JOB"]
    assert f"{clock(NOW - 100)}  1m 00s  n0,n1,n2,n3,... (6)" in lines[0]
    assert "preempted" in lines[0]
    assert "requeue" in lines[0]
    assert lines[1].split() == ["1", *clock(NOW - 30).split(), "30", "s", "7"]


@pytest.mark.parametrize(
    ("state", "open_end"), [("running", False), ("saving", False), ("lost", True), ("failed", True)]
)
def test_an_end_that_nobody_recorded_is_not_made_up(root: Path, state: str, open_end: bool) -> None:
    *_, line = attempts(root, state, AttemptReport(0, started=NOW - 30))
    assert ("not recorded" in line) is open_end
    assert ("30 s" in line) is not open_end


def test_an_earlier_attempt_without_an_end_has_ended_all_the_same(root: Path) -> None:
    _, first, second = attempts(root, "running", AttemptReport(0, started=NOW - 90), AttemptReport(1, started=NOW - 30))
    assert "not recorded" in first
    assert "not recorded" not in second


def test_a_failure_comes_with_the_last_lines_of_its_log(root: Path) -> None:
    failure = FailureReport(
        2,
        1,
        "crash",
        host="n1",
        error="ValueError: x",
        step=7,
        log=str(root / "a/rank-00001.log"),
        log_tail=["one", "two"],
    )
    assert failure_lines(report(root, "failed", failure=failure)) == [
        "",
        "first failure: attempt 2, rank 1 on n1 after step 7: ValueError: x",
        "last lines of runs/a/rank-00001.log:",
        "  | one",
        "  | two",
    ]


def test_a_mistake_of_the_user_is_told_once(root: Path) -> None:
    failure = FailureReport(0, 1, "user_error", error="data.x=1: too few", log=str(root / "log"), log_tail=["the same"])
    assert failure_lines(report(root, "failed", failure=failure, why="rank 1 on n1: data.x=1: too few")) == []
    assert failure_lines(report(root, "failed", failure=failure, why="another reason"))[-1] == "  | the same"


def test_a_failure_of_which_little_is_known_says_that_much(root: Path) -> None:
    assert failure_lines(report(root)) == []
    shown = report(root, "failed", failure=FailureReport(0, None, "no record", step=0, log="/log"))
    assert failure_lines(shown) == ["", "first failure: attempt 0 after step 0: no record"]


@pytest.mark.parametrize("state", STATES)
def test_every_state_but_two_says_what_to_type_next(root: Path, state: str) -> None:
    told = hint(report(root, state))
    assert (told is None) is (state in ("finished", "held"))


def test_what_goes_on_says_from_where(root: Path) -> None:
    checkpoint = CheckpointReport(100, "/c", "quick")
    assert hint(report(root, "failed", checkpoint=checkpoint)) == (
        "mend the cause, then the same command with run.name=a goes on from step 100"
    )
    assert hint(report(root, "stopped")) == "the same command with run.name=a goes on from the start"


def test_words_that_a_shell_would_split_are_quoted(root: Path) -> None:
    elsewhere = RunReport("b c", str(root.parent / "other" / "b c"), "running")
    assert hint(elsewhere) == "follow it: python -m dthpc.status 'other/b c' --watch"
    elsewhere.state = "stopped"
    assert hint(elsewhere) == "the same command with run.name='b c' goes on from the start"
