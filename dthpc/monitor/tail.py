"""The newest events of a record that may be huge, read from its end backwards."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 64 * 1024
LIMIT = 4 * 1024 * 1024
LONGEST_LINE = 1024 * 1024


@dataclass(frozen=True)
class Tail:
    """What the ends of a record say."""

    events: list[dict[str, Any]]
    """Events in the order of the file: all of its last block, before them the newest of each wanted kind that the last
    block lacks, and the events of its first block of those kinds that are still missing."""

    offset: int
    """Byte after the last whole line, from which `read_events` goes on."""


def read_tail(path: Path, want: Collection[str], block: int = BLOCK, limit: int = LIMIT) -> Tail:
    """Read the last block of a record whole, and before it the newest event of each wanted kind.

    Args:
        path: the `events.jsonl`; absent is the same as empty.
        want: kinds to look for further back than the last block, and in the first one.
        block: bytes read at once, in one `read` call.
        limit: bytes looked through from the end; the cost is bounded by it, whatever the size of the file.

    Raises:
        OSError: the file exists and cannot be read.
    """
    if not path.exists():
        return Tail([], 0)
    with open(path, "rb", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        start, data = _read_back(file.fileno(), end, min(block, end))
        whole = data.rfind(b"\n") + 1
        offset = start + whole
        events = parse_lines(data[:whole])
        missing = set(want) - {event.get("kind") for event in events}
        older: list[dict[str, Any]] = []
        floor = max(0, end - limit)
        while missing and start > floor:
            stop = start
            start, data = _read_back(file.fileno(), stop, min(block, stop - floor))
            older = _newest_of(data, missing) + older
            missing -= {event["kind"] for event in older}
        head = _first_block(file.fileno(), min(block, start), missing) if start > 0 and missing else []
    return Tail(head + older + events, offset)


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The events of whole lines; a line that is no JSON object (torn by a kill) is passed over."""
    events = []
    for line in data.split(b"\n"):
        event = _parse(line)
        if event is not None:
            events.append(event)
    return events


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _read_back(descriptor: int, stop: int, length: int) -> tuple[int, bytes]:
    """Bytes before `stop` from the start of a line on, with their offset; at least one whole line if there is any."""
    while True:
        begin = max(0, stop - length)
        data = os.pread(descriptor, stop - begin, begin)
        if begin == 0:
            return 0, data
        # The byte before decides whether the block happens to begin with a line; simplest is to drop up to a newline.
        first = data.find(b"\n") + 1
        if 0 < first < len(data):
            return begin + first, data[first:]
        if length >= LONGEST_LINE:
            return begin, data
        length *= 2


def _newest_of(data: bytes, kinds: Collection[str]) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        # The log is written without spaces: to search its bytes is far cheaper than to parse all lines.
        mark = f'"kind":"{kind}"'.encode()
        at = data.rfind(mark)
        while at >= 0:
            begin = data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at)
            event = _parse(data[begin : end if end >= 0 else len(data)])
            if event is not None and event.get("kind") == kind:
                found.append((begin, event))
                break
            at = data.rfind(mark, 0, begin)
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def _first_block(descriptor: int, length: int, want: set[str]) -> list[dict[str, Any]]:
    data = os.pread(descriptor, length, 0)
    return [event for event in parse_lines(data[: data.rfind(b"\n") + 1]) if event.get("kind") in want]
