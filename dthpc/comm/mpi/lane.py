"""The order of a group's operations, and what is said when one of them does not end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dthpc.comm.mpi.board import Board
from dthpc.comm.mpi.errors import CommunicationError, CommunicationTimeout
from dthpc.comm.mpi.operation import Operation, Request, Steps
from dthpc.comm.mpi.progress import Pace
from dthpc.comm.shared.room import ExchangeError


class Lane:
    """Starts the operations of one group so that MPI sees them in the same order on all ranks.

    MPI matches collectives of a communicator by the order in which ranks start them. Any number of operations of one
    step may be under way. An operation of several steps is alone: what is called after it is started when it is over.

    An operation is started by whoever drives it first, those before it too: who calls an asynchronous one has other
    things to do.
    """

    def __init__(self, board: Board, keep: Callable[[object], None], per_offer: int = 8) -> None:
        """Make an empty one.

        Args:
            board: where ranks tell each other what they wait for.
            keep: takes what must not be freed, because MPI may still write into it.
            per_offer: questions to MPI between two offers of the core to other threads.
        """
        self.blocker: Operation | None = None
        self.broken: str | None = None
        self._board = board
        self._keep = keep
        self._per_offer = per_offer
        self._lock = threading.RLock()
        self._queue: deque[Operation] = deque()
        self._live: set[Operation] = set()
        self.count = 0
        """Collectives so far."""

    def submit(self, operation: Operation) -> None:
        """Have a collective started when it is its turn, and somebody drives it."""
        with self._lock:
            self.check()
            self.count += 1
            operation.number = self.count
            self._queue.append(operation)

    def advance(self) -> None:
        """Start what can be started."""
        blocker = self.blocker
        if blocker is not None:
            blocker.poll()  # which starts what waited for it
            return
        over: list[Operation] = []
        with self._lock:
            while self._queue and self.blocker is None and self.broken is None:
                following = self._queue.popleft()
                if not self._start(following):
                    over.append(following)
        for following in over:
            following.tell()
        if self.broken is not None:
            self._refuse_queued(self.broken)

    def submit_now(self, operation: Operation) -> None:
        """Start a message between two ranks: those match by tag, and wait for no collective."""
        self.check()
        if operation.begin():
            operation.tell()
        else:
            self._live.add(operation)

    def start_alone(self, steps: Steps) -> Sequence[Request] | None:
        """Start a collective of one step without an `Operation`, as that costs as much as a small message does.

        Returns:
            What it waits for; None: others are before it, and nothing was done.
        """
        with self._lock:
            self.check()
            if self.blocker is not None or self._queue:
                return None
            self.count += 1
            return next(steps, ())

    def adopt(self, operation: Operation, requests: Sequence[Request]) -> None:
        """Go on with what was started alone."""
        operation.number = self.count
        self._live.add(operation)
        operation.adopt(requests)

    def _start(self, operation: Operation) -> bool:
        """Start it; returns whether it goes on."""
        if operation.begin():
            return False
        self._live.add(operation)
        if operation.staged:
            self.blocker = operation
        return True

    def check(self) -> None:
        """Refuse work where an earlier operation has left the group unusable."""
        if self.broken is not None:
            raise CommunicationError(f"{self._board.group} can't be used any more: {self.broken}")

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; returns whether that came true."""
        limit = time.monotonic() + timeout_s
        while True:
            with self._lock:
                waiting = [*list(self._live), *self._queue]
            if not waiting:
                return True
            if time.monotonic() > limit or self.broken is not None:
                return False
            for operation in waiting:
                operation.poll()
            time.sleep(50e-6)

    # --- what operations tell ---------------------------------------------------------------------------------------

    def ended(self, operation: Operation) -> None:
        """Start what waited for it."""
        self._live.discard(operation)
        if self.blocker is operation:
            self.blocker = None
            self.advance()

    def slow(self, operation: Operation) -> None:
        """Tell the other ranks that this one waits."""
        self._board.tell(operation.number, operation.call.common)

    def late(self, operation: Operation) -> None:
        """End it with an error that says who is missing, and the group with it."""
        elapsed = time.monotonic() - operation.began
        missing = self._board.missing(operation.number, operation.call.common)
        text = f"{self._where(operation)} did not end within {elapsed:.1f} s. {missing}"
        self._break(f"its {operation.call.name} did not end in time", operation, CommunicationTimeout(text))

    def error(self, operation: Operation, cause: BaseException) -> BaseException:
        """Say where MPI or the exchange over memory failed; errors of other kinds are left as they are."""
        if type(cause).__module__.split(".")[0] != "mpi4py" and not isinstance(cause, ExchangeError):
            return cause
        elapsed = time.monotonic() - operation.began
        failure = CommunicationError(f"{self._where(operation)} failed after {elapsed:.1f} s: {cause}")
        failure.__cause__ = cause
        self.broken = self.broken or f"its {operation.call.name} failed"
        self._keep(None)
        return failure

    def pace(self) -> Pace:
        """Ask for about a millisecond before the first nap."""
        return Pace(1500, self._per_offer)

    def _break(self, why: str, operation: Operation, failure: CommunicationError) -> None:
        with self._lock:
            self.broken = self.broken or why
        self._keep(operation.fail(failure))
        self._refuse_queued(why)

    def _refuse_queued(self, why: str) -> None:
        """End what was not started, rather than have it wait for its time to be over."""
        with self._lock:
            queued, self._queue = list(self._queue), deque()
        for following in queued:
            following.fail(CommunicationError(f"{self._where(following)} was not started: {why}"))

    def _where(self, operation: Operation) -> str:
        count = f"operation {operation.number}, " if operation.number else ""
        return f"{count}{operation.call} of {self._board.group} on rank {self._board.rank}"
