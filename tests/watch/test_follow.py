from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.monitor.events import EventLog
from dthpc.rundir import RunDir
from dthpc.slurm.records import JobRecord
from dthpc.watch.follow import follow
from dthpc.watch.survey import survey
from tests.attempt.runs import wait_for
from tests.watch.records import Records
from tests.watch.test_survey import Queue

FAKE_RANK = Path(__file__).with_name("fake_rank.py")

DOOR = """
import sys
from pathlib import Path
from dthpc.watch.follow import follow
from dthpc.rundir import RunDir
sys.exit(follow(RunDir(Path(sys.argv[1])), stop_on_interrupt=sys.argv[2] == "stop"))
"""


def prepare(root: Path, name: str = "demo", **story: Any) -> RunDir:
    """A run that the real keeper can keep."""
    run = RunDir(root / name)
    run.path.mkdir()
    LaunchPlan(
        kind="local",
        nodes=1,
        max_nodes=1,
        tasks_per_node=2,
        cpus_per_task=1,
        threads_per_rank=1,
        gpus_per_node=0,
        rank_command=[sys.executable, str(FAKE_RANK)],
        keeper_command=[sys.executable, "-m", "dthpc.attempt.keeper"],
        requeue="restart",
        max_attempts_without_progress=1,
    ).write(run)
    (run.path / "story.json").write_text(json.dumps(story))
    return run


@pytest.fixture
def keep() -> Iterator[Callable[[RunDir], subprocess.Popen[bytes]]]:
    """Starts the real keeper of a run; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run: RunDir) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dthpc.attempt.keeper", str(run.path)]
        with open(run.path / "keeper.log", "wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        EventLog(run.events).write("run_submitted", job_id=str(started[-1].pid), launcher="local")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class Interrupted(io.StringIO):
    """An output that sends Ctrl-C to this process once it has been given some words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.words and self.words in text:
            self.words = ""
            os.kill(os.getpid(), signal.SIGINT)
        return written


class Handle:
    """What the door holds of a keeper that it started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def done(self) -> bool:
        return self.process.poll() is not None


class Terminal:
    """A follower on a terminal of its own."""

    def __init__(self, run: RunDir, mode: str = "stop", columns: int = 120) -> None:
        self.main, side = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-c", DOOR, str(run.path), mode]
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=env, start_new_session=True, preexec_fn=self._own(side)
        )
        os.close(side)
        self.text = ""

    @staticmethod
    def _own(side: int) -> Callable[[], None]:
        def take() -> None:
            fcntl.ioctl(side, termios.TIOCSCTTY, 0)

        return take

    def read_until(self, words: str, seconds: float = 60.0) -> str:
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} did not come in: {self.text!r}"
            if not self._read(0.5) and self.process.poll() is not None:
                assert words in self.text, self.text
        return self.text

    def close(self) -> int:
        while self._read(60.0):
            pass
        os.close(self.main)
        return self.process.wait(60)

    def _read(self, seconds: float) -> bool:
        if not select.select([self.main], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.main, 65536)
        except OSError:
            return False
        self.text += data.decode()
        return bool(data)


def test_a_finished_run_ends_with_its_summary(tmp_path: Path, keep: Any) -> None:
    run, out = prepare(tmp_path, steps=30), io.StringIO()
    code = follow(run, stop_on_interrupt=True, job=Handle(keep(run)), out=out)
    shown = out.getvalue()
    assert code == 0, shown
    assert "attempt 0 starts on 1 node" in shown
    assert "step 1/30  loss 3.0000" in shown
    assert "finished       demo: step 30/30" in shown
    assert "bits per byte  3.100 held-out; a bigram model: 3.400 (0.300 better)" in shown
    assert "\x1b" not in shown


def test_a_failed_run_shows_the_first_failing_rank_and_its_last_lines(tmp_path: Path, keep: Any) -> None:
    run, out = prepare(tmp_path, steps=30, fail_at=12), io.StringIO()
    assert follow(run, stop_on_interrupt=True, job=Handle(keep(run)), out=out) == 1
    shown = out.getvalue()
    assert "first failure: attempt 0, rank 1" in shown
    assert "ValueError: the data has a hole" in shown
    assert "  | rank 1 is about to fail at step 12" in shown
    assert "failed at step 12: " in shown.splitlines()[-2]


def test_a_rank_that_was_killed_without_a_word_is_found(tmp_path: Path, keep: Any) -> None:
    run, out = prepare(tmp_path, steps=30, fail_at=12, kill=True), io.StringIO()
    assert follow(run, stop_on_interrupt=True, job=Handle(keep(run)), out=out) == 1
    assert "rank 1: killed by SIGKILL" in out.getvalue()


def test_a_keeper_that_dies_at_once_is_told(tmp_path: Path) -> None:
    run, out = prepare(tmp_path, steps=30), io.StringIO()
    process = subprocess.Popen(["false"])
    process.wait()
    EventLog(run.events).write("run_submitted", job_id=str(process.pid), launcher="local")
    assert follow(run, stop_on_interrupt=True, job=Handle(process), out=out) == 1
    assert "lost: it was submitted, but its keeper never started" in out.getvalue()


def test_a_killed_keeper_is_noticed(tmp_path: Path, keep: Any) -> None:
    run = prepare(tmp_path, steps=30, hang_at=5)
    process = keep(run)
    terminal = Terminal(run)
    terminal.read_until("step 5/30")
    process.kill()
    process.wait()
    terminal.read_until("lost at step 5")
    assert terminal.close() == 1


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, keep: Any) -> None:
    run = prepare(tmp_path, steps=30, hang_at=5)
    keep(run)
    terminal = Terminal(run)
    terminal.read_until("step 5/30")
    os.write(terminal.main, b"\x03")
    terminal.read_until("asked the run to save and stop")
    terminal.read_until("the same command with run.name=demo goes on")
    assert "stopped at step 5" in terminal.text
    assert terminal.close() == 130


@pytest.mark.parametrize("words", ["attempt 0 starts", "bits per byte"])
def test_ctrl_c_between_two_runs_of_a_sweep_stops_the_sweep(tmp_path: Path, words: str) -> None:
    """The keeper has let go of the first run when the signal comes, so that no lock names it."""
    first, second = prepare(tmp_path, "a", steps=3), prepare(tmp_path, "b", steps=30, hang_at=5)
    index = tmp_path / "sweep.json"
    index.write_text(json.dumps({"runs": [str(first.path), str(second.path)]}))
    process = subprocess.Popen([sys.executable, "-m", "dthpc.attempt.keeper", "--sweep", str(index)])
    try:
        for run in (first, second):
            EventLog(run.events).write("run_submitted", job_id=str(process.pid), launcher="local")
        wait_for(lambda: '"step":5,' in second.events.read_text())
        out = Interrupted(words)
        assert follow(first, stop_on_interrupt=True, job=Handle(process), out=out) == 130
        assert "finished       a: step 3/3" in out.getvalue()
        assert process.wait(120) == 75
        assert survey([second], None)[0].state == "stopped"
    finally:
        process.kill()
        process.wait()


def test_a_second_ctrl_c_kills(tmp_path: Path, keep: Any) -> None:
    """The ranks are frozen, so that they can't save."""
    run = prepare(tmp_path, steps=30, hang_at=5)
    keeper = keep(run)
    terminal = Terminal(run)
    terminal.read_until("step 5/30")
    for rank in children(keeper.pid):
        os.kill(rank, signal.SIGSTOP)
    os.write(terminal.main, b"\x03")
    terminal.read_until("saving…")
    os.write(terminal.main, b"\x03")
    terminal.read_until("what was not saved is lost")
    assert terminal.close() in (1, 130)
    assert keeper.wait(120) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_of_the_follower_stop_a_local_run_too(tmp_path: Path, keep: Any, number: int) -> None:
    run = prepare(tmp_path, steps=30, hang_at=5)
    keeper = keep(run)
    terminal = Terminal(run)
    terminal.read_until("step 5/30")
    terminal.process.send_signal(number)
    assert keeper.wait(120) == 75
    assert terminal.close() == 128 + number


def test_a_closed_terminal_stops_a_local_run(tmp_path: Path, keep: Any) -> None:
    run = prepare(tmp_path, steps=30, hang_at=5)
    keeper = keep(run)
    terminal = Terminal(run)
    terminal.read_until("step 5/30")
    os.close(terminal.main)
    assert keeper.wait(120) == 75
    assert terminal.process.wait(120) == 128 + signal.SIGHUP


def test_who_only_looks_goes_away_and_the_run_goes_on(tmp_path: Path, keep: Any) -> None:
    run = prepare(tmp_path, steps=30, hang_at=5)
    keeper = keep(run)
    terminal = Terminal(run, mode="look")
    terminal.read_until("step 5/30")
    os.write(terminal.main, b"\x03")
    terminal.read_until("the run goes on; follow it again: python -m dthpc.status")
    assert terminal.close() == 130
    assert keeper.poll() is None


def test_a_terminal_gets_one_changing_line_that_never_wraps(tmp_path: Path, keep: Any) -> None:
    run = prepare(tmp_path, steps=200, pause=0.005)
    keep(run)
    terminal = Terminal(run, columns=60)
    terminal.read_until("finished")
    terminal.close()
    drawn = [part.split("\x1b[K")[-1] for part in terminal.text.split("\r")]
    bars = [part for part in drawn if part.startswith(("step ", "  ", " ")) and "ETA" in part]
    assert bars
    assert max(len(bar.rstrip("\n")) for bar in bars) < 60


def test_a_pending_job_says_why_and_a_cancelled_one_ends_it(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm").submit("7")
    queue, out = Story(["PENDING", "PENDING", "CANCELLED"]), io.StringIO()
    assert follow(records.run, stop_on_interrupt=True, slurm=queue, slurm_every_s=0.0, out=out) == 130
    assert "pending: waits in the queue (Priority)" in out.getvalue()
    assert "cancelled" in out.getvalue().splitlines()[-2]


def test_a_preemption_is_told_with_what_is_safe(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm").submit("7").start(total=200)
    queue, out = Story(["RUNNING", "PENDING", "RUNNING", "COMPLETED"]), io.StringIO()

    def preempted() -> None:
        records.steps(10, 120).write("stop_requested", signal="SIGTERM", step=120)
        records.write("checkpoint_saved", step=120, path="step-00000120", seconds=1.0, bytes=2**20)
        records.end("preempted", "requeue", "preempted by Slurm; state saved at step 120", progressed=True)

    def goes_on() -> None:
        records.start(total=200, resumed_from=120).steps(130, 200).write("train_end", step=200, seconds=90.0)
        records.end("finished", "finish", "the run is finished", progressed=True)

    queue.before = [preempted, lambda: None, goes_on]
    assert follow(records.run, stop_on_interrupt=True, slurm=queue, slurm_every_s=0.0, out=out) == 0
    shown = out.getvalue()
    assert "preempted at step 120, checkpoint of step 120 saved; waiting for the restart" in shown
    assert "requeued: waits in the queue" in shown
    assert "resumed from step 120" in shown
    assert "finished    demo: step 200/200 in 1m 30s, 2 attempts" in shown


class Story(Queue):
    """A queue whose one job has another state each time it is asked."""

    def __init__(self, states: list[str]) -> None:
        super().__init__()
        self.states = states
        self.before: list[Callable[[], None]] = []

    def jobs(self, job_ids: Any) -> dict[str, JobRecord]:
        if self.before:
            self.before.pop(0)()
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        reason = "Priority" if state == "PENDING" else None
        self.held = {"7": JobRecord("7", state, "squeue", reason=reason)}
        return dict(self.held)


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
