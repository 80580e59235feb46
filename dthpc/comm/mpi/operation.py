"""One operation on its way: steps that are driven to their end by whoever has time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dthpc.comm.mpi.call import Call
from dthpc.comm.mpi.errors import CommunicationTimeout
from dthpc.comm.mpi.progress import Pace

_TELL_AFTER_S = 1.0
"""Once an operation has waited this long, the rank tells the others that it waits in it."""

_BRIEF = 400


class Request(Protocol):
    """Something that MPI, or a device, is doing."""

    def Test(self) -> bool:
        """Whether it is done, without waiting."""


Steps = Generator[Sequence[Request], None, Any]
"""An operation: it starts requests and yields them, goes on when all are done, and returns its result."""


def briefly(requests: Sequence[Request] | None, steps: Steps, per_offer: int) -> Sequence[Request] | None:
    """Drive steps for a few hundred microseconds; returns what they then wait for, None if they are over.

    Args:
        requests: what they wait for now.
        steps: the steps.
        per_offer: questions between two offers of the core to other threads.
    """
    for turn in range(1, _BRIEF):
        for request in requests or ():
            if not request.Test():
                break
        else:
            requests = next(steps, None)
            if requests is None:
                return None
        if turn % per_offer == 0:
            os.sched_yield()
    return requests


def within(context: Callable[[], AbstractContextManager[Any]], steps: Steps) -> Steps:
    """The same steps, each taken in a context of its own.

    Threads take turns in them, and what torch knows of a thread (its stream, whether autograd records) holds in none of
    the others, nor between two steps.
    """
    while True:
        with context():
            try:
                requests = next(steps)
            except StopIteration as end:
                return end.value
        yield requests


class Order(Protocol):
    """The group's operations, as one of them sees them."""

    def advance(self) -> None:
        """Start the operations whose turn it is."""

    def ended(self, operation: Operation) -> None:
        """Hear that an operation is over."""

    def slow(self, operation: Operation) -> None:
        """Hear that an operation waits for long."""

    def late(self, operation: Operation) -> None:
        """Hear that the time of an operation is over, and end it with an error."""

    def error(self, operation: Operation, cause: BaseException) -> BaseException:
        """Put an operation's name into what went wrong in it."""

    def pace(self) -> Pace:
        """How a waiting thread passes its time."""


class Operation:
    """An operation and its state; any thread may drive it, one at a time."""

    def __init__(self, call: Call, steps: Steps, order: Order, timeout_s: float, *, staged: bool = False) -> None:
        """Describe an operation.

        Args:
            call: what the user called.
            steps: what there is to do.
            order: the group's operations.
            timeout_s: seconds after which it is an error.
            staged: whether its steps start collectives after their first `yield`, so that no later operation of the
                group may start before it is over.
        """
        self.call, self.staged = call, staged
        self.number = 0
        self.waiters = 0
        self.over = False
        self.failure: BaseException | None = None
        self.result: Any = None
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self._alarm = self.began + min(_TELL_AFTER_S, timeout_s / 4)
        self._steps = steps
        self._order = order
        self._requests: Sequence[Request] = ()
        self._lock = threading.Lock()
        self._started = False
        self._calls: list[Callable[[Operation], None]] = []

    def begin(self) -> bool:
        """Start the first step, in the order of the group's operations; returns whether it is over.

        It is not asked whether it is done: MPI would move data meanwhile, in a thread that has other things to do.
        """
        with self._lock:
            self._started = True
            if not self.over:
                self._next_step()
        return self.over

    def adopt(self, requests: Sequence[Request]) -> None:
        """Go on with steps of which one was started elsewhere."""
        self._started = True
        self._requests = requests

    def poll(self) -> bool:
        """Drive it on, without waiting; returns whether it is over."""
        if self.over:
            return True
        if not self._started:
            self._order.advance()
        elif self._step():
            self.tell()
            return True
        now = time.monotonic()
        if now > self._alarm:
            self._alarm = self.deadline
            self._order.late(self) if now > self.deadline else self._order.slow(self)
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        """Drive it to its end.

        Args:
            timeout_s: seconds to wait at most; None: until the operation's own time is over.

        Raises:
            CommunicationError: it failed.
            CommunicationTimeout: it did not end in time.
        """
        if not self.over:
            self.waiters += 1
            try:
                self._drive(None if timeout_s is None else time.monotonic() + timeout_s)
            finally:
                self.waiters -= 1
        if self.failure is not None:
            raise self.failure

    def then(self, call: Callable[[Operation], None]) -> None:
        """Have something called once it is over, at once if it is."""
        with self._lock:
            if not self.over:
                self._calls.append(call)
                return
        call(self)

    def tell(self) -> None:
        """Let the next operations start, and those know that asked to."""
        self._order.ended(self)
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call(self)

    def fail(self, failure: BaseException) -> object:
        """End it with an error; returns what must be kept, because MPI may still write into it."""
        with self._lock:
            if self.over:
                return None
            kept = (self._steps, self._requests)
            self._end(failure)
        self.tell()
        return kept

    def _drive(self, limit: float | None) -> None:
        pace = self._order.pace()
        clock = time.perf_counter
        while True:
            began = clock()
            if self.poll():
                return
            pace.rest(clock() - began)
            if limit is not None and pace.napping and time.monotonic() > limit:
                raise CommunicationTimeout(f"{self.call} did not end within the time given to wait()")

    def _step(self) -> bool:
        """Take the steps that can be taken; returns whether that has ended it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.over:
                return False  # whoever ended it tells
            while self._requests_done():
                self._next_step()
            return self._ended()
        finally:
            self._lock.release()

    def _ended(self) -> bool:
        return self.over

    def _requests_done(self) -> bool:
        """Whether the next step can be taken."""
        try:
            return not self.over and all(request.Test() for request in self._requests)
        except Exception as error:
            self._end(self._order.error(self, error))
            return False

    def _next_step(self) -> None:
        try:
            self._requests = next(self._steps)
        except StopIteration as end:
            self.result = end.value
            self._end(None)
        except Exception as error:
            self._end(self._order.error(self, error))

    def _end(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._requests = ()
        self.over = True


def done(order: Order) -> Operation:
    """An operation that is over."""
    over = Operation(Call("nothing"), _nothing(), order, 0.0)
    over.begin()
    return over


def _nothing() -> Steps:
    yield from ()
