"""Ctrl-C and its kin as things to be asked for, instead of exceptions that strike in the middle of a line."""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context in which signals are collected, and in which `wait` ends early when one comes.

    Only the main thread can take signals over; in another one they stay as they are.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._reader = self._writer = -1
        self._old_wakeup = -1

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in CAUGHT:
            # A follower that was started with nohup goes on when the terminal is closed.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader < 0:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def wait(self, seconds: float) -> None:
        """Sleep, or less if a signal comes."""
        readers = [self._reader] if self._reader >= 0 else []
        if select.select(readers, [], [], seconds)[0]:
            os.read(self._reader, 512)
