from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dthpc.resilience.stop import StopFlag
from tests.attempt.runs import alive, wait_for

FLAG = """
import signal, sys
from dthpc.resilience.stop import StopFlag
stop = StopFlag().install()
assert "torch" not in sys.modules
print("ready", flush=True)
while stop.requested is None:
    signal.sigtimedwait([], 0.01)
print(stop.requested, stop.time > 0)
"""

WORKER = """
import os, signal, sys, time
from dthpc.resilience.stop import StopFlag, worker_signals
StopFlag().install()
child = os.fork()
if child == 0:
    worker_signals(0)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1)
signal.pause()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_stop_signal_only_sets_the_flag(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", FLAG], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGCONT)
    process.send_signal(number)
    assert process.stdout.read().split() == [signal.Signals(number).name, "True"]
    assert process.wait(10) == 0


def test_the_first_request_is_kept() -> None:
    stop = StopFlag()
    assert stop.requested is None
    assert stop.time is None
    stop.request("SIGUSR2")
    first = stop.time
    stop.request("SIGTERM")
    assert (stop.requested, stop.time) == ("SIGUSR2", first)
    assert first == pytest.approx(time.time(), abs=60)


def test_a_worker_outlives_stop_signals_but_not_its_rank() -> None:
    rank = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    worker = int(rank.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        os.kill(worker, number)
    assert alive(worker)
    rank.kill()
    rank.wait()
    wait_for(lambda: not alive(worker))
