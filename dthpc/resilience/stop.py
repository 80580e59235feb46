"""How a rank learns that it must stop: signals set a flag, and the job looks at it between two steps."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""Slurm asks by SIGTERM (preemption, time limit, scancel) or by the early SIGUSR2; a terminal by SIGINT."""

EXIT_STOPPED = 75
"""Exit code of a rank that stopped on request with its state saved (EX_TEMPFAIL: try again later)."""

_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """Raised by a job that was asked to stop and has saved its state; the rank then ends with code 75."""

    def __init__(self, step: int | None = None) -> None:
        """Remember the step at which the job stopped, if it counts steps."""
        self.step = step
        super().__init__("stopped on request" if step is None else f"stopped on request at step {step}")


class StopFlag:
    """Set by a signal, read by the job.

    The handler does nothing else: Python runs it between two bytecodes of the main thread, so it may interrupt any
    line of the program, and inside a blocked collective it waits until that returns.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._time: float | None = None

    def install(self) -> StopFlag:
        """Take over the stop signals of this process; only the main thread may do so."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def request(self, name: str) -> None:
        """Ask for a stop, as a signal of that name would; the first request is the one that is kept."""
        if self._requested is None:
            self._time = time.time()
            self._requested = name

    @property
    def requested(self) -> str | None:
        """Name of the first stop signal, such as `SIGTERM`; `None` while nobody asked."""
        return self._requested

    @property
    def time(self) -> float | None:
        """When the stop was asked for, in Unix seconds."""
        return self._time


def worker_signals(worker_id: int = 0) -> None:
    """Set up a helper process of a rank (as `worker_init_fn` of a `DataLoader`, for instance).

    Slurm signals every descendant of a step, so a worker with default handlers would die while its rank still needs
    data to reach the next step boundary. Workers ignore the stop signals instead, and die with their rank.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Args:
        number: the signal.
        parent: process id that the parent must still have; where it has already gone, this process ends at once,
            since the kernel would tell nothing any more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
