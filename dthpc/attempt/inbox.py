"""Signals as messages: the keeper reads them one by one where it is ready for them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType


class SignalInbox:
    """Collects signals of this process, and wakes a waiting keeper when one comes or a child ends."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Take over the named signals, such as `SIGTERM`; only the main thread may do so."""
        self._pending: list[str] = []
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for name in names:
            signal.signal(getattr(signal, name), self._handle)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number).name)

    def wait(self, timeout_s: float) -> list[str]:
        """Names of the signals since the last call; returns early when one comes, or when a child ends."""
        if not self._pending:
            select.select([self._read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        names, self._pending = self._pending, []
        return names
