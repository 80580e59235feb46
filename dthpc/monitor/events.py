"""The run's append-only record: one JSON object a line, for people, scripts and the progress display alike."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to `events.jsonl`; each line is one `write` call, so that writers never interleave."""

    def __init__(self, path: Path, **common: Any) -> None:
        """Open the file for appending.

        Args:
            path: the file; its folder is made if absent.
            common: fields that every event of this writer carries, such as `attempt=3`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._common = common
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_torn_line(path)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event of a kind; non-finite floats are written as strings, since JSON has none."""
        event = {"time": round(time.time(), 3), "kind": kind, **self._common, **fields}
        line = json.dumps({key: _plain(value) for key, value in event.items()}, separators=(",", ":"))
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _end_torn_line(self, path: Path) -> None:
        # A writer that was killed in the middle of a line must not swallow the next writer's first event.
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(self._descriptor, b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def read_events(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Events from a byte offset on.

    Returns:
        The events of all whole lines from `offset`, and the offset to go on from. A last line without its newline is
        left for the next call; a line that is no JSON (torn by a kill) is passed over.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data.rfind(b"\n") + 1
    events = []
    for line in data[:whole].splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events, offset + whole
