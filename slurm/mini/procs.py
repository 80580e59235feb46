"""Processes: who is ours, who is alive, and how to end them without ever hitting a stranger.

A daemon is known by its pid and the instant it started, so that a recycled pid is never killed. Everything else that a
cluster started, jobs' orphans included, is known by the network namespace it sits in.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from .errors import MiniError


def start_time(stat):
    """The start time, in clock ticks since boot, from a line of /proc/PID/stat; None for a zombie."""
    # The command name, in parentheses, may hold blanks and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def alive_pid(pidfile):
    """The pid of the process that wrote its /proc/PID/stat line into `pidfile`, or None once it is gone."""
    try:
        recorded = Path(pidfile).read_text()
        pid = int(recorded.split(" ", 1)[0])
        current = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    started = start_time(current)
    return pid if started is not None and started == start_time(recorded) else None


def pids():
    """Every process of this machine."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def members(namespaces):
    """The live processes inside the given network namespaces, a set of (device, inode)."""
    return [pid for pid in pids() if namespace_of(f"/proc/{pid}/ns/net") in namespaces]


def namespace_of(path):
    """What identifies a namespace file: (device, inode), or None where there is none (a zombie has none)."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def kill_members(namespaces, seconds=10):
    """SIGKILL all that lives in the namespaces, until nothing does; returns those that would not die."""
    deadline = time.monotonic() + seconds
    while left := members(namespaces):
        for pid in left:
            kill(pid, signal.SIGKILL, lambda pid=pid: namespace_of(f"/proc/{pid}/ns/net") in namespaces)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def kill(pid, number, ours):
    """Send a signal to the process if `ours()` holds of it; that it has just ended is no error."""
    with contextlib.suppress(ProcessLookupError):
        held = os.pidfd_open(pid)
        try:
            # Asked with the process held: from here on the pid may be recycled, but not the descriptor.
            if ours():
                signal.pidfd_send_signal(held, number)
        finally:
            os.close(held)


def wait_for(ready, seconds, pause=0.03):
    """Poll `ready()` until it holds, at most `seconds`; returns its last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := ready()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def search_path():
    """PATH with the system directories, which many environments lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])


def attempt(command, **options):
    """Run a command of the system, and return its result whatever that is."""
    environment = {**os.environ, "PATH": search_path()}
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def checked(command, **options):
    """Run a command of the system and return what it prints; its failure is a MiniError that shows it."""
    result = attempt(command, **options)
    if result.returncode:
        raise MiniError(f"{' '.join(command)}: {result.stderr.strip() or 'failed'}")
    return result.stdout
