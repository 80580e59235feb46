"""The thread that drives what nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dthpc.comm.mpi.progress import Progress


class Asked:
    """An operation that is over after some questions, or when the test says so."""

    def __init__(self, questions: int = 1 << 60) -> None:
        self.waiters, self.began, self.over = 0, time.monotonic(), False
        self.threads: set[int] = set()
        self.ended = threading.Event()
        self._left = questions

    def poll(self) -> bool:
        self.threads.add(threading.get_ident())
        self._left -= 1
        if self._left <= 0:
            self.end()
        return self.over

    def end(self) -> None:
        self.over = True
        self.ended.set()


@pytest.fixture
def progress() -> Iterator[Progress]:
    made = Progress()
    yield made
    made.close()


def test_it_drives_to_the_end_whether_it_is_awake_or_asleep(progress: Progress) -> None:
    for pause_s in (0.0, 0.0005, 0.05):
        time.sleep(pause_s)
        one = Asked(20)
        progress.watch(one)
        assert one.ended.wait(20)
        assert one.threads
        assert threading.get_ident() not in one.threads


def test_what_is_waited_for_is_left_to_the_waiter(progress: Progress) -> None:
    awaited, other = Asked(), Asked(3)
    awaited.waiters = 1
    progress.watch(awaited)
    progress.watch(other)
    assert other.ended.wait(20)
    assert not awaited.threads
    # A waiter that gave up.
    awaited.waiters, awaited._left = 0, 5
    assert awaited.ended.wait(20)


def test_it_can_be_closed_while_something_is_under_way(progress: Progress) -> None:
    never = Asked()
    progress.watch(never)
    progress.close()
    assert not any(thread.name == "dthpc-mpi" and thread.is_alive() for thread in threading.enumerate())
