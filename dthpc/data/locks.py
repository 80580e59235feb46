"""Advisory file locks that spare double work; nothing that uses them relies on them for being right."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

FIRST_POLL_S = 0.01
LONGEST_POLL_S = 0.5
TELL_AFTER_S = 5.0


@contextmanager
def exclusive(path: Path, ready: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold the exclusive lock of a file, or find that it is no longer needed.

    The lock is polled for rather than awaited in the kernel, so that a waiter also notices work that was finished on a
    node whose locks are not seen here. On a file system without locks the block is entered without one.

    Args:
        path: the lock file; made if absent and left in place, since removing it would let two holders in.
        ready: tells whether what the lock guards has been made by somebody else meanwhile.

    Yields:
        True with the lock held (or where locks do not work), False as soon as `ready()` says so.

    Raises:
        OSError: the lock file cannot be made.
    """
    descriptor = _open(path)
    try:
        yield _wait(descriptor, path, ready)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Take the lock of an open file at once: True if taken, False if held elsewhere, None where locks do not work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        # The lock of another user's cache: locking needs no more than reading.
        return os.open(path, os.O_RDONLY)


def _wait(descriptor: int, path: Path, ready: Callable[[], bool] | None) -> bool:
    pause, began, told = FIRST_POLL_S, time.monotonic(), False
    while try_lock(descriptor) is False:
        if ready is not None and ready():
            return False
        if not told and time.monotonic() - began > TELL_AFTER_S:
            logger.info("waiting for another process (%s) that holds %s", _holder(descriptor), path)
            told = True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)
    _sign(descriptor)
    return True


def _sign(descriptor: int) -> None:
    # Only for the message of those who wait; a read-only or full file system must not forbid the lock itself.
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError:
        logger.debug("the holder's name could not be written", exc_info=True)


def _holder(descriptor: int) -> str:
    try:
        return os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "unknown"
    except OSError:
        return "unknown"
