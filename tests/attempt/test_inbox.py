from __future__ import annotations

import subprocess
import sys

CODE = """
import os, signal, subprocess, sys, time
from dthpc.attempt.inbox import SignalInbox
inbox = SignalInbox(("SIGTERM", "SIGUSR2"))
for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
    os.kill(os.getpid(), number)
assert inbox.wait(60) == ["SIGUSR2", "SIGTERM", "SIGUSR2"]
assert inbox.wait(0) == []
child = subprocess.Popen([sys.executable, "-c", ""])
began = time.monotonic()
assert inbox.wait(60) == []
child.wait()
assert time.monotonic() - began < 50
"""


def test_signals_come_in_order_and_a_child_that_ends_wakes_the_keeper() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
