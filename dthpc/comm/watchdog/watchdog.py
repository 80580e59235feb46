"""One rank's watchdog: a thread that tells rank 0 that this rank lives and what it waits for, and ends it when it must.

The main thread may be blocked in a collective, where Python can neither run a signal's handler nor raise. So whatever
has to happen then happens here: the record is written, and the process ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.comm.watchdog.account import Account, Witness
from dthpc.comm.watchdog.clock import BEAT_S, Clock
from dthpc.comm.watchdog.wire import Line, Message
from dthpc.rundir import write_json

_TICK_S = 0.25
_AHEAD = 0.95
"""Share of the time-out at which the watchdog acts: before the backend does, whose error names no rank."""

_WARN = 0.5
"""Share of the time-out after which a wait is worth a word."""

_SHOWN = 64
"""Calls that an account holds when it is sent to rank 0; the file has all."""

_ANSWER_S = 10.0
"""How long rank 0 may take for its verdict, and a main thread for its answer to a stop signal, before a record."""

_HUB_SLACK_S = 5.0
"""What rank 0 may be silent for longer than the others: it is the one that judges."""


@dataclass(frozen=True)
class Ending:
    """Why a rank ends that has done nothing wrong itself."""

    why: str
    """In one line."""

    blamed: tuple[int, ...]
    """Ranks that are the cause; empty where it is not known."""


class Watchdog:
    """Watches one rank from a thread of its own, until `close`."""

    def __init__(
        self,
        witness: Witness,
        line: Line,
        folder: Path,
        *,
        timeout_s: float,
        silence_s: float,
        end: Callable[[Ending], None],
    ) -> None:
        """Start the thread; only the main thread may do so, since it takes over SIGUSR1.

        Args:
            witness: makes this rank's accounts.
            line: the connection to the hub, introduced.
            folder: where the record is written.
            timeout_s: seconds after which a collective is overdue.
            silence_s: seconds without a sign of life after which rank 0 counts as lost; 0: never.
            end: called in the watchdog's thread when this rank must end; does not return.
        """
        self._witness, self._line, self._folder = witness, line, folder
        self._timeout_s, self._silence_s, self._end = timeout_s, silence_s, end
        self._lock = threading.Lock()
        self._claimed = False
        self._ending: Ending | None = None
        self._told = threading.Event()
        self._closing = self._dismissed = False
        self._clock = Clock()
        self._heard = self._clock.now()
        self._warned = False
        self._overdue: float | None = None
        self._stop: tuple[str, float] | None = None
        self._wake, self._before = _catch_signals()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    # --- what the main thread calls ---------------------------------------------------------------------------------

    def finished(self) -> None:
        """The job is over, well or by a stop: this rank's silence means nothing any more."""
        self._claim()
        self._line.send({"kind": "bye"})

    def failed(self, error: str, echo: bool) -> Ending | None:
        """The job raised.

        Args:
            error: in one line.
            echo: whether it may be the consequence of what another rank did or did not; then the verdict is waited for.

        Returns:
            The verdict; None where there is none, or where the error speaks for itself.
        """
        self._claim()
        self.write_record()
        account = self._witness.account(_SHOWN, failed=True) if echo else None
        told = None if account is None else account.to_json()
        self._line.send({"kind": "failed", "error": error, "echo": echo, "account": told})
        if not echo:
            return None
        self._told.wait(_ANSWER_S)
        return self._ending

    def write_record(self, told: str | None = None) -> None:
        """Write this rank's account with all calls that are remembered; never raises."""
        with contextlib.suppress(Exception):
            account = self._witness.account(signal=told)
            write_json(self._folder / f"rank-{account.rank:05d}.json", account.to_json())

    def close(self) -> None:
        """Stop watching."""
        self._closing = True
        self._thread.join(timeout=5)
        self._line.close()
        _release_signals(self._wake, self._before)

    def _claim(self) -> None:
        """Take the end of this process in hand; where the watchdog has it, wait for that."""
        with self._lock:
            mine = self._ending is None or self._claimed
            self._claimed = True
        if not mine:
            threading.Event().wait()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beat = 0.0
        while not self._closing:
            sources: list[Any] = [self._wake] if self._line.closed else [self._wake, self._line]
            readable = select.select(sources, [], [], _TICK_S)[0]
            try:
                now = self._clock.now()
                if self._line in readable:
                    self._listen(now)
                if self._wake in readable:
                    self._on_signals(now)
                if now - beat >= BEAT_S and not self._line.closed:
                    beat = now
                    self._line.send({"kind": "alive"})
                self._look(now)
            except Exception:
                # A fault of the watching must not end what is watched.
                traceback.print_exc()
                self._line.closed = True

    def _listen(self, now: float) -> None:
        for message in self._line.receive():
            self._heard = now
            self._on_message(message)
        if self._line.closed and not self._dismissed and not self._claimed:
            self._leave(Ending("lost the connection to rank 0: its process is gone (killed, or out of memory?)", (0,)))

    def _on_message(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "tell":
            self._line.send({"kind": "account", "account": self._account().to_json()})
        elif kind == "end":
            self._leave(Ending(str(message["why"]), tuple(message["blamed"])))
        elif kind == "bye":
            self._line.closed = self._dismissed = True

    def _account(self) -> Account:
        return self._witness.account(_SHOWN, None if self._stop is None else self._stop[0])

    def _on_signals(self, now: float) -> None:
        for number in self._wake.recv(64):
            if number == signal.SIGUSR1:
                self.write_record("SIGUSR1")
                say(f"dthpc: asked by SIGUSR1: {self._words()}; all in {self._folder}")
            elif self._stop is None and number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                self._stop = signal.Signals(number).name, now

    def _words(self) -> str:
        account = self._account()
        return f"rank {account.rank} is at {account.main or 'no place that is known'}"

    def _look(self, now: float) -> None:
        """See whether this rank waits for too long, or rank 0 is silent."""
        if self._stop is not None and self._stop[1] >= 0 and now - self._stop[1] > _ANSWER_S and not self._claimed:
            # Asked to stop and not at a step's end yet: Slurm may kill it any moment.
            self.write_record(self._stop[0])
            self._stop = self._stop[0], -1.0
        if self._line.closed or self._claimed:
            return
        if 0 < self._silence_s < now - self._heard - _HUB_SLACK_S:
            self._leave(Ending(f"no sign of life from rank 0 for {now - self._heard:.0f} s", (0,)))
        waited = self._longest_wait()
        if waited > self._timeout_s * _AHEAD:
            self._on_overdue(now, waited)
        elif waited > self._timeout_s * _WARN:
            if not self._warned:
                self._line.send({"kind": "stuck", "over": False, "seconds": waited})
            self._warned = True
        else:
            self._warned, self._overdue = False, None

    def _on_overdue(self, now: float, waited: float) -> None:
        if self._overdue is None:
            self._overdue = now
            self._line.send({"kind": "stuck", "over": True, "seconds": waited})
        elif now - self._overdue > _ANSWER_S:
            self._leave(Ending(f"a collective does not end after {waited:.0f} s, and rank 0 does not say why", ()))

    def _longest_wait(self) -> float:
        """Seconds that a thread has waited for a call, or that torch's recorder knows one to be under way."""
        recorder = self._witness.recorder
        waits = [] if recorder is None else [self._clock.age(wait.since) for wait in recorder.waits()]
        late = self._witness.torch_record.overdue(self._timeout_s * _WARN)
        if late is not None:
            waits.append(self._clock.age(time.monotonic() - float(late["age_s"])))
        return max(waits, default=0.0)

    def _leave(self, ending: Ending) -> None:
        """End this process, unless its main thread is doing so."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
            if self._claimed:
                self._told.set()
                return
        self.write_record()
        self._end(ending)


def _catch_signals() -> tuple[socket.socket, tuple[int, Any, socket.socket]]:
    """Have signals' numbers written to a socket by the interpreter's C handler, which runs in a blocked thread too."""
    wake, written = socket.socketpair()
    written.setblocking(False)
    previous = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    # What is sent to a child that was forked, a data loader's worker for instance, is not meant for this process.
    os.register_at_fork(after_in_child=lambda: _forget(written))
    return wake, (previous, handler, written)


def _forget(written: socket.socket) -> None:
    if written.fileno() >= 0:
        signal.set_wakeup_fd(-1)
        written.close()


def _release_signals(wake: socket.socket, before: tuple[int, Any, socket.socket]) -> None:
    previous, handler, written = before
    signal.set_wakeup_fd(previous)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if handler is None else handler)
    wake.close()
    written.close()


def say(text: str) -> None:
    """Write a line to the log, whatever the other threads are blocked in."""
    # Not by print: the main thread may hold the lock of the stream.
    with contextlib.suppress(OSError):
        os.write(2, text.encode() + b"\n")
