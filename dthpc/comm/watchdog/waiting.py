"""Waits for other ranks that no process group knows of, told to the flight record once they take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dthpc.comm.watchdog.recorder import Recorder

_recorders: list[Recorder] = []


def record_with(recorder: Recorder) -> None:
    """Have waits recorded."""
    _recorders.append(recorder)


def stop_recording(recorder: Recorder) -> None:
    """Undo `record_with`."""
    _recorders.remove(recorder)


@contextmanager
def waiting(group: Any, operation: str, peer: int) -> Iterator[None]:
    """Around a wait for a rank.

    Args:
        group: the process group that both are in.
        operation: what this rank waits in: `send` or `recv`.
        peer: the other one's position in the group.
    """
    entries = [(recorder, recorder.begin(group, operation, (None, peer))) for recorder in _recorders]
    try:
        yield
    except BaseException:
        for recorder, entry in entries:
            recorder.fail(entry)
        raise
    for recorder, entry in entries:
        recorder.end(entry, None)
