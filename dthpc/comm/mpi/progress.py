"""Who drives operations: the thread that waits for one, else one thread of the process for all.

MPI moves data only inside its calls. So that communication overlaps with computation, a thread asks MPI about every
operation that nobody waits for. It must not take the computing thread's core: it sleeps between its questions, but
not while data flow, which shows in a question that took longer than an empty one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Protocol

from dthpc.placement.apply import bind_helper

_NAP_LEAST_S = 2e-6
_NAP_MOST_S = 300e-6
_GRACE_S = 100e-6
"""Who starts an operation often waits for it at once; only after this time is it driven for it."""

_ASIDE_S = 1e-3
"""How long it naps while a thread waits for an operation: that one drives MPI for all, and needs its core."""

_LINGER_S = 2e-3
"""How long the thread looks for more after the last operation, so that nobody has to wake it."""

_AFTER_MOVE = 64
"""Questions before the next nap once data has moved: the other side has its turn."""

MOVED_S = 6e-6
"""A question to MPI that took longer than this has moved data; an empty one takes less than 1 µs."""


class Pollable(Protocol):
    """An operation as its drivers see it."""

    waiters: int
    """Threads that wait for it, and drive it meanwhile."""

    began: float
    """When it was started, as `time.monotonic()` has it."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""

    def poll(self) -> bool:
        """Drive it on, without waiting; returns whether it has ended."""


class Pace:
    """How a thread passes the time between two questions that were in vain."""

    def __init__(self, questions: int, per_offer: int) -> None:
        """Start anew.

        Args:
            questions: to ask before the first nap.
            per_offer: questions between two offers of the core to other threads, which may be the rank waited for.
        """
        self._left, self._per_offer = questions, per_offer
        self._naps = Naps()
        self.napping = False
        """Whether it has come to naps, so that other work costs no delay."""

    def rest(self, asked_s: float) -> None:
        """Pass some time.

        Args:
            asked_s: how long the question took.
        """
        if asked_s > MOVED_S:
            self._left = max(self._left, _AFTER_MOVE)
        elif self._left == 0:
            self.napping = True
            self._naps.rest(asked_s)
            return
        else:
            self._left -= 1
        if self._left % self._per_offer == 0:
            os.sched_yield()


class Naps:
    """Only naps between questions, short ones while data flow.

    A thread that asks again at once would hold Python's lock nearly always, and the computing thread would get it only
    every 5 ms.
    """

    def __init__(self) -> None:
        self._nap_s = _NAP_LEAST_S

    def rest(self, asked_s: float) -> None:
        """Pass some time.

        Args:
            asked_s: how long the question took.
        """
        self._nap_s = _NAP_LEAST_S if asked_s > MOVED_S else min(self._nap_s * 1.3, _NAP_MOST_S)
        time.sleep(self._nap_s)


class Progress:
    """The thread that drives operations which nobody waits for; it starts with the first of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[Pollable] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._awake = False

    def watch(self, operation: Pollable) -> None:
        """Drive an operation until it is over."""
        with self._changed:
            self._watched.append(operation)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="dthpc-mpi", daemon=True)
                self._thread.start()
            elif not self._awake:
                self._changed.notify()

    def close(self) -> None:
        """End the thread, and leave what is not over."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        _nap_exactly()
        bind_helper()
        naps = Naps()
        while True:
            driven = self._next()
            if driven is None:
                return
            began = time.perf_counter()
            ended = [operation.poll() for operation in driven]
            # What follows one that has ended may be there already.
            naps.rest(MOVED_S * 2 if any(ended) else (time.perf_counter() - began) / len(driven))

    def _next(self) -> list[Pollable] | None:
        """What is to be driven; waits for something; None: the thread shall end."""
        last = time.monotonic()
        while True:
            with self._changed:
                if self._closed:
                    return None
                now = time.monotonic()
                self._watched = [operation for operation in self._watched if not operation.over]
                waited_for = any(operation.waiters for operation in self._watched)
                driven = [each for each in self._watched if each.waiters == 0 and now - each.began > _GRACE_S]
                if driven and not waited_for:
                    return driven
                if self._watched:
                    last = now
                self._awake = now - last < _LINGER_S
                if not self._awake:
                    self._changed.wait()
                    last = time.monotonic()
                    continue
            # What follows in other operations than the one that is waited for needs a look now and then.
            for operation in driven:
                operation.poll()
            time.sleep(_ASIDE_S if waited_for else _GRACE_S)


def _nap_exactly() -> None:
    """Have Linux end this thread's naps on time; it adds 50 µs by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns
