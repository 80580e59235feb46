"""Locks between processes."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dthpc.data.locks import exclusive

HOLDER = """
import sys
from pathlib import Path
from dthpc.data.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1] + ".left").touch()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock until it is sent a line."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_waits_for_the_holder_to_leave(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as other:
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
        with exclusive(path) as held:
            assert held
            assert (tmp_path / "lock.left").exists()


def test_killed_holder_leaves_the_lock_free(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as other:
        other.kill()
        with exclusive(tmp_path / "lock") as held:
            assert held


def test_does_not_wait_for_work_that_is_done(tmp_path: Path) -> None:
    with holder(tmp_path / "lock"), exclusive(tmp_path / "lock", ready=lambda: True) as held:
        assert not held


def test_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with exclusive(tmp_path / "lock") as held:
        assert held
