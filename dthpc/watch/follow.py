"""Follows a run until it ends: a progress bar on a terminal, lines elsewhere; the same for local and Slurm runs.

Everything is read from the run's folder (and, now and then, from Slurm), so any number of people can follow, from
anywhere, and training does not know. Polling costs well under a thousandth of a core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Protocol, TextIO

from dthpc.errors import UserError
from dthpc.monitor.events import read_events
from dthpc.monitor.narrate import bar_line, narrate, tell_step
from dthpc.monitor.progress import Progress
from dthpc.monitor.screen import Screen
from dthpc.monitor.summary import report_tables, run_word, summary_lines
from dthpc.monitor.units import clock
from dthpc.rundir import RunDir
from dthpc.watch.interrupts import Interrupts
from dthpc.watch.report import WAITING, RunReport
from dthpc.watch.state import Keeper
from dthpc.watch.survey import Jobs, is_keeper, keeper_of, progress_of, survey
from dthpc.watch.view import failure_lines, hint

POLL_S = 0.25
LOOK_S = 1.0
"""Seconds between two looks at whether a local keeper lives."""

STEP_LINE_S = 10.0
"""Fewest seconds between two step lines where there is no terminal."""

START_S = 30.0
"""Seconds that a local keeper may take to appear."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT

_REPLAYED = 12


class Handle(Protocol):
    """The part of a submitted job that is needed here."""

    def done(self) -> bool:
        """Whether its process has ended."""
        ...


def follow(
    run: RunDir,
    *,
    stop_on_interrupt: bool,
    job: Handle | None = None,
    slurm: Jobs | None = None,
    slurm_every_s: float | None = None,
    out: TextIO | None = None,
) -> int:
    """Show a run until it ends.

    Args:
        run: the run.
        stop_on_interrupt: whether Ctrl-C (and SIGTERM, SIGHUP) stops a local run: it saves, and a second one kills it.
            Otherwise, and for a Slurm run always, the follower goes away and the run goes on.
        job: the handle of a job that was just started, which tells of a keeper that died before its first record.
        slurm: whom to ask for the states of Slurm jobs.
        slurm_every_s: seconds between two questions to Slurm; by default more while nothing changes.
        out: where to show it; standard output by default.

    Returns:
        0 finished; 1 failed or lost; 130 stopped or cancelled. Where the follower was interrupted, 128 + the signal,
        however the run ended, so that nothing that was to follow it is begun.
    """
    with Interrupts() as interrupts:
        follower = _Follower(run, stop_on_interrupt, job, Screen(out or sys.stdout), interrupts)
        follower.slurm, follower.slurm_every_s = slurm, slurm_every_s
        return follower.follow()


class _Follower:
    """One follower; its state is what it has shown."""

    def __init__(
        self,
        run: RunDir,
        stops: bool,
        job: Handle | None,
        screen: Screen,
        interrupts: Interrupts,
    ) -> None:
        self.run = run
        self.stops = stops
        self.job = job
        self.slurm: Jobs | None = None
        self.slurm_every_s: float | None = None
        self.screen = screen
        self.interrupts = interrupts
        self.progress = Progress()
        self.report = RunReport(name=run.name, path=str(run.path))
        self.offset = 0
        self.handled = 0
        self.stop_sent_to: int | None = None
        self.began = time.monotonic()
        self.next_look = 0.0
        self.lost_since: float | None = None
        self.step_line_at = -STEP_LINE_S
        self.waiting_line = ""

    def follow(self) -> int:
        """Show the run until it ends or the user leaves; returns the exit code."""
        self._replay()
        try:
            while True:
                self._take_events()
                self._look()
                code = self._answer_signals()
                if code is not None:
                    return code
                if self.report.ended and not self._may_still_come():
                    self._take_events()
                    code = self._finish()
                    # A signal that comes while this run ends is for what its keeper would do next.
                    if self.stops and self._local():
                        self._answer_signals()
                    return 128 + self.interrupts.received[0] if self.interrupts.received else code
                self._show()
                self.interrupts.wait(POLL_S if self._local() else LOOK_S)
        finally:
            self.screen.clear()

    def _local(self) -> bool:
        return self.report.kind != "slurm"

    def _replay(self) -> None:
        """Take in what happened before, and show it from the newest submission (or else start) on."""
        _, events, self.offset = progress_of(self.run)
        kinds = [event.get("kind") for event in events]
        marks = [index for index, kind in enumerate(kinds) if kind in ("run_submitted", "attempt_start")]
        submissions = [index for index in marks if kinds[index] == "run_submitted"]
        since = (submissions or marks or [len(events)])[-1]
        lines = []
        for index, event in enumerate(events):
            self.progress.apply(event)
            line = narrate(event, self.progress) if index >= since else None
            lines += [line] if line else []
        for line in lines[-_REPLAYED:]:
            self.screen.line(line)

    def _take_events(self) -> None:
        events, self.offset = read_events(self.run.events, self.offset)
        for event in events:
            self.progress.apply(event)
            line = narrate(event, self.progress)
            if line is not None:
                self.screen.line(line)
            elif event.get("kind") == "step" and not self.screen.terminal:
                self._step_line()
            if event.get("kind") in ("attempt_end", "train_end", "run_submitted", "attempt_start"):
                self.next_look = 0.0

    def _step_line(self) -> None:
        now = time.monotonic()
        if now - self.step_line_at >= STEP_LINE_S:
            self.step_line_at = now
            self.screen.line(tell_step(self.progress, time.time()))

    def _look(self) -> None:
        """Find out what state the run is in, as seldom as will do."""
        now = time.monotonic()
        if now < self.next_look:
            return
        lives = self._local() and self._keeper()[0] is Keeper.ALIVE
        if not (lives and self.report.state == "running" and self.progress.attempt_end is None):
            self.report = survey([self.run], self.slurm, detail=True)[0]
            self.lost_since = (self.lost_since or now) if self.report.state == "lost" else None
        self.next_look = now + (LOOK_S if self._local() else self._slurm_pause(now))

    def _slurm_pause(self, now: float) -> float:
        """Seconds until Slurm is asked again: soon after a change is likely, and else seldom, as sites demand."""
        if self.slurm_every_s is not None:
            return self.slurm_every_s
        if self.progress.attempt_end is not None and self.report.state not in WAITING:
            return LOOK_S  # Slurm needs a moment to see that the job has ended
        if self.report.state == "running":
            return 30.0
        return 3.0 if now - self.began < 30 else 10.0

    def _may_still_come(self) -> bool:
        """Whether a run that looks over may only be between two processes."""
        if self.lost_since is None or (self._local() and self.job is not None and self.job.done()):
            return False
        starts = self.report.awaits_start or not self.report.attempts
        grace = START_S if starts or not self._local() else LOOK_S * 5
        return time.monotonic() - self.lost_since < grace

    def _keeper(self) -> tuple[Keeper, int | None]:
        try:
            return keeper_of(self.run)
        except (OSError, UserError):
            return Keeper.UNKNOWN, None

    def _show(self) -> None:
        waiting = self._waiting_text()
        if not self.screen.terminal:
            if waiting and waiting != self.waiting_line:
                self.screen.line(waiting)
            self.waiting_line = waiting
        elif waiting:
            self.screen.status(waiting if self.screen.unicode else waiting.encode("ascii", "replace").decode())
        else:
            self.screen.status(bar_line(self.progress, time.time(), self.screen.width, self.screen.unicode))

    def _waiting_text(self) -> str:
        """What it waits for; empty while it trains."""
        report = self.report
        if self.handled and self._local():
            if not self.progress.trains:
                return "stopping… (Ctrl-C again kills it)"
            return "saving… (Ctrl-C again kills it, and what was not saved is lost)"
        if report.state == "pending" and self._local():
            return "starting…"
        if report.state in WAITING:
            start = report.pending.start if report.pending else None
            return f"{report.state}: {report.why or 'no reason given'}" + (
                f", expected {clock(start)}" if start else ""
            )
        if report.conflict is not None and report.state == "running":
            return ""
        if self.progress.step is None and self.progress.train_end is None:
            return "starting…"
        return ""

    def _answer_signals(self) -> int | None:
        """React to Ctrl-C and its kin; returns an exit code where the follower is to leave."""
        new = self.interrupts.received[self.handled :]
        if new and not (self.stops and self._local()):
            self._detach()
            return 128 + new[0]
        self.handled += len(new)
        if not self.handled:
            return None
        pid = self._keeper()[1] or self._submitted_keeper()
        if pid is not None and self.stop_sent_to != pid:
            self.screen.line("asked the run to save and stop")
            self._send(pid, signal.SIGINT)
            self.stop_sent_to = pid
        elif pid is not None and new:
            # The keeper itself ends its ranks at the second SIGINT; if it no longer listens, the kernel does it.
            self.screen.line("killed; what was not saved is lost")
            self._send(pid, signal.SIGINT if self.handled == 2 else signal.SIGKILL)
        return None

    def _submitted_keeper(self) -> int | None:
        """The process that keeps this run's whole sweep: when it is done with this run, no lock tells of it."""
        over = self.report.ended or self.progress.attempt_end is not None
        if not over or (self.job is not None and self.job.done()):
            return None
        pid, submitted = self.progress.keeper_pid, self.progress.submitted
        return pid if pid is not None and submitted is not None and is_keeper(pid, submitted) else None

    def _send(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        self.next_look = 0.0

    def _detach(self) -> None:
        word = run_word(self.run)
        self.screen.line(f"the run goes on; follow it again: python -m dthpc.status {word} --watch")
        if self.report.job_id is not None and not self._local():
            self.screen.line(f"to cancel it: scancel {self.report.job_id}")

    def _finish(self) -> int:
        report = self.report
        self.screen.clear()
        if report.state == "finished":
            for title, columns, rows in report_tables(self.progress.report or {}):
                self.screen.line(f"\n{title}" if title else "")
                self.screen.table(columns, rows)
            checkpoint = Path(report.checkpoint.path) if report.checkpoint else None
            for line in ["", *summary_lines(self.run, self.progress, checkpoint, len(report.attempts))]:
                self.screen.line(line)
            return EXIT_FINISHED
        for line in failure_lines(report) if report.state in ("failed", "lost") else []:
            self.screen.line(line)
        at = f" at step {report.step}" if report.step is not None else ""
        self.screen.line(f"{report.state}{at}: {report.why or 'no reason recorded'}")
        if report.conflict:
            self.screen.line(report.conflict)
        self.screen.line(hint(report) or "")
        if report.state in ("failed", "lost"):
            return EXIT_FAILED
        return EXIT_INTERRUPTED
