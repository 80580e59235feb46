"""A thread that sees to what collectives on the host need between their messages, while the main thread computes."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

import torch

Call = Callable[[], None]


class Courier:
    """Makes calls one after the other, in the order in which they are handed in.

    Waiting for a message in the main thread would tie each rank to the pace of the others several times in a pass; then
    the delays of all of them add up.
    """

    def __init__(self, waiting: int = 2) -> None:
        """Start the thread, which ends with this object.

        Args:
            waiting: lists of calls that may wait; who hands in one more, waits too.
        """
        self._calls: queue.Queue[list[Call] | None] = queue.Queue(waiting)
        self._failures: list[BaseException] = []
        arguments = (self._calls, self._failures)
        thread = threading.Thread(target=_work, args=arguments, name="courier", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._calls, thread)

    def hand_in(self, calls: list[Call]) -> None:
        """Have calls made."""
        self._calls.put(calls)

    def finish(self) -> None:
        """Wait until all calls were made; raises what one of them raised, after which the others were left out."""
        self._calls.join()
        if self._failures:
            failure = self._failures[0]
            self._failures.clear()
            raise failure


def _end(calls: queue.Queue[list[Call] | None], thread: threading.Thread) -> None:
    # One that is stuck in a message is left to the end of the process, as is what it would have done.
    with contextlib.suppress(queue.Full):
        calls.put_nowait(None)
        if thread is not threading.current_thread():
            thread.join(timeout=1.0)


@torch.no_grad()
def _work(calls: queue.Queue[list[Call] | None], failures: list[BaseException]) -> None:
    while True:
        batch = calls.get()
        try:
            for call in batch or ():
                if not failures:
                    call()
        except BaseException as error:  # whatever it is, the main thread must hear of it
            failures.append(error)
        finally:
            calls.task_done()
        if batch is None:
            return
        del batch
