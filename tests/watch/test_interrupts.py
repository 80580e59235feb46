from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dthpc.watch.interrupts import CAUGHT, Interrupts

FOREVER_S = 60.0
"""A wait that would be noticed."""


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in CAUGHT}
    wakeup = signal.set_wakeup_fd(-1)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(wakeup)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in CAUGHT]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("number", CAUGHT)
def test_a_signal_is_noted_and_raises_nothing(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        assert interrupts.received == [number]


def test_signals_are_noted_in_their_order_each_time() -> None:
    with Interrupts() as interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert interrupts.received == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]


def test_a_wait_ends_when_a_signal_comes() -> None:
    # It is sent once this thread has begun to wait in the kernel, or at worst just before.
    main = threading.main_thread().ident
    assert main is not None
    with Interrupts() as interrupts:
        sender = threading.Thread(target=lambda: signal.pthread_kill(main, signal.SIGINT))
        sender.start()
        interrupts.wait(FOREVER_S)
        sender.join()
        assert interrupts.received == [signal.SIGINT]


def test_a_signal_from_before_the_wait_is_not_slept_through() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.wait(FOREVER_S)
        assert interrupts.received == [signal.SIGTERM]


def test_one_signal_ends_one_wait() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.wait(FOREVER_S)
        interrupts.wait(0.0)
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.wait(FOREVER_S)
        assert interrupts.received == [signal.SIGTERM, signal.SIGINT]


def test_without_a_signal_the_time_passes() -> None:
    with Interrupts() as interrupts:
        interrupts.wait(0.0)
        interrupts.wait(0.001)
        assert interrupts.received == []


def test_a_flood_of_signals_blocks_nobody() -> None:
    with Interrupts() as interrupts:
        for _ in range(70_000):  # more than a pipe holds
            signal.raise_signal(signal.SIGINT)
        assert len(interrupts.received) == 70_000
        interrupts.wait(FOREVER_S)


def test_everything_is_as_before_afterwards_also_after_an_error() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    before, files = handlers(), open_files()
    with pytest.raises(ValueError, match="on the way"), Interrupts():
        raise ValueError("on the way")
    assert handlers() == before
    assert open_files() == files
    assert signal.set_wakeup_fd(-1) == writer
    os.close(reader)
    os.close(writer)


def test_ctrl_c_strikes_again_afterwards() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_one_within_another_gives_back_what_it_took() -> None:
    with Interrupts() as outer:
        with Interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        outer.wait(FOREVER_S)
        assert (inner.received, outer.received) == ([signal.SIGINT], [signal.SIGTERM])


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_in_another_thread_signals_stay_with_the_main_one() -> None:
    before, seen = handlers(), []

    def other() -> None:
        with Interrupts() as interrupts:
            seen.append(handlers())
            interrupts.wait(0.0)
            seen.append(interrupts.received)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before, []]
    assert handlers() == before


def test_a_program_that_is_started_meanwhile_inherits_no_pipe() -> None:
    code = "import os; print(sorted(int(name) for name in os.listdir('/proc/self/fd') if int(name) > 2))"

    def inherited() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout

    before = inherited()
    with Interrupts():
        assert inherited() == before
