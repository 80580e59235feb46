"""The flight record of one rank: its last collectives and messages, and what its threads wait for.

torch keeps such a record for Gloo's and NCCL's collectives, but none of point-to-point messages, nor of a group that is
written in Python, and none that says who waits. What a call costs: benchmarks/flight_record.py.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OWN_CODE = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
"""Folders whose frames are not shown as the place of a call: torch and this room."""

POINT_TO_POINT = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
"""Messages between two ranks, with the words for them; they have sequence numbers of their own."""


class GroupInfo:
    """What is remembered of a process group, without keeping it alive."""

    def __init__(self, group: Any) -> None:
        """Read the group's names; its members are asked for when they are needed."""
        self.group = weakref.ref(group)
        self._ranks: list[int] | None = None
        room = getattr(group, "room", None)
        try:
            if room is not None:  # an exchange over memory, which has no name of its own
                self._ranks = [int(name.split()[1]) for name in room.names]
                self.name, described = f"memory of ranks {self._ranks}", ""
            else:
                self.name = str(group.group_name)
                described = str(getattr(group, "group_desc", "") or "")
        except (RuntimeError, ValueError):  # a group that was made by hand, and given no name
            self.name, described = f"{type(group).__name__} {id(group):x}", ""
        self.description = {"default_pg": "world", "undefined": ""}.get(described, described)
        self.collectives = itertools.count(1)
        self.messages = itertools.count(1)

    @property
    def ranks(self) -> list[int]:
        """Numbers of its members among all ranks, in its order; empty where nobody can tell any more."""
        group = self.group()
        if self._ranks is None and group is not None:
            try:
                self._ranks = dist.get_process_group_ranks(group)
            except (KeyError, RuntimeError, ValueError):  # a group that is just being made, or was destroyed
                return []
        return self._ranks or []


class Entry:
    """One call."""

    __slots__ = ("began", "code", "dtype", "failed", "group", "line", "operation", "peer", "sequence", "shape", "work")

    def __init__(
        self,
        group: GroupInfo,
        operation: str,
        sequence: int,
        peer: int | None,
        shape: torch.Size | None,
        dtype: torch.dtype | None,
        place: tuple[CodeType | None, int],
    ) -> None:
        """Take what is known when the call begins."""
        self.began = time.monotonic()
        self.group, self.operation, self.sequence, self.peer = group, operation, sequence, peer
        self.shape, self.dtype = shape, dtype
        self.code, self.line = place
        # A weak reference to its `Work`, None once there is none, and False while the call itself is not back.
        self.work: weakref.ref[Any] | bool | None = False
        self.failed = False

    @property
    def state(self) -> str:
        """`called` (the call is not back), `in flight`, `finished` or `failed`."""
        if self.failed:
            return "failed"
        if self.work is False:
            return "called"
        # Who has waited for a work lets go of it, so one that is gone counts as done.
        work = self.work() if isinstance(self.work, weakref.ref) else None
        if work is None or (isinstance(work, dist.Work) and work.is_completed()):
            return "finished"
        return "in flight"

    def to_json(self, now: float) -> dict[str, Any]:
        """The entry as JSON values; `now` is `time.monotonic()`."""
        members = self.group.ranks
        peer = members[self.peer] if self.peer is not None and 0 <= self.peer < len(members) else self.peer
        return {
            "group": self.group.name,
            "operation": self.operation,
            "sequence": self.sequence,
            "peer": peer,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "state": self.state,
            "age_s": round(now - self.began, 3),
            "place": "" if self.code is None else f"{self.code.co_filename}:{self.line}",
        }


@dataclass(frozen=True)
class Wait:
    """A thread that waits for a call's end."""

    thread: int
    """Its identifier."""

    since: float
    """`time.monotonic()` when it began to wait."""

    entry: Entry | None
    """The call; None where nobody recorded it."""


class Recorder:
    """The record of this process. Threads may share it."""

    def __init__(self, length: int) -> None:
        """Make room for the last `length` calls."""
        self.entries: deque[Entry] = deque(maxlen=length)
        self._groups: dict[int, GroupInfo] = {}
        self._inside: dict[int, Entry] = {}
        self._waits: dict[int, tuple[Any, float]] = {}
        self._failed: deque[Entry] = deque(maxlen=8)
        self._own: dict[str, bool] = {}

    def begin(self, group: Any, operation: str, arguments: tuple[Any, ...]) -> Entry:
        """Record that a method of a group is called."""
        info = self._groups.get(id(group))
        if info is None or info.group() is not group:
            info = self._groups[id(group)] = GroupInfo(group)
        peer = None
        if operation in POINT_TO_POINT:
            sequence = next(info.messages)
            if operation != "recv_anysource" and len(arguments) > 1 and isinstance(arguments[1], int):
                peer = arguments[1]
        else:
            sequence = next(info.collectives)
        tensor = _first_tensor(arguments)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        entry = Entry(info, operation, sequence, peer, shape, dtype, self._caller())
        self.entries.append(entry)
        self._inside[threading.get_ident()] = entry
        return entry

    def end(self, entry: Entry, work: Any) -> None:
        """Record that the method came back, with a `Work` or with nothing."""
        entry.work = None if work is None else weakref.ref(work)
        self._inside.pop(threading.get_ident(), None)

    def fail(self, entry: Entry) -> None:
        """Record that the method raised."""
        entry.failed = True
        self._failed.append(entry)
        self._inside.pop(threading.get_ident(), None)

    def begin_wait(self, work: Any) -> tuple[Any, float] | None:
        """Record that this thread waits for a `Work`; returns what it waited for before, for `end_wait`."""
        thread = threading.get_ident()
        before = self._waits.get(thread)
        self._waits[thread] = (work, time.monotonic())
        return before

    def fail_wait(self, work: Any) -> None:
        """Record that waiting raised: the call is what this rank could not get beyond."""
        entry = self._entry_of(work)
        if entry is not None:
            entry.failed = True
            self._failed.append(entry)

    def end_wait(self, before: tuple[Any, float] | None) -> None:
        """Record that the wait is over."""
        if before is None:
            del self._waits[threading.get_ident()]
        else:
            self._waits[threading.get_ident()] = before

    def waits(self) -> Iterator[Wait]:
        """What the threads wait for at this moment, by `Work.wait` or inside the call itself."""
        for thread, (work, since) in list(self._waits.items()):
            yield Wait(thread, since, self._entry_of(work))
        for thread, entry in list(self._inside.items()):
            if thread not in self._waits:
                yield Wait(thread, entry.began, entry)

    def failures(self) -> list[Wait]:
        """The last calls that raised, each with the time from which it was waited for."""
        return [Wait(0, entry.began, entry) for entry in list(self._failed)]

    def groups(self) -> list[GroupInfo]:
        """Groups that were used."""
        return list(self._groups.values())

    def _entry_of(self, work: Any) -> Entry | None:
        for entry in reversed(list(self.entries)):
            if isinstance(entry.work, weakref.ref) and entry.work() is work:
                return entry
        return None

    def _caller(self) -> tuple[CodeType | None, int]:
        """The innermost frame that belongs neither to torch nor to this room."""
        own = self._own
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            name = frame.f_code.co_filename
            known = own.get(name)
            if known is None:
                known = own[name] = name.startswith(OWN_CODE)
            if not known:
                return frame.f_code, frame.f_lineno
            frame = frame.f_back
        return None, 0


_SEQUENCES = (list, tuple)


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor | None:
    """The first tensor of a call; lists of lists of tensors are among the forms that torch uses."""
    for argument in arguments:
        while type(argument) in _SEQUENCES and argument:
            argument = argument[0]
        # The exact type first: asking whether something is an instance of Tensor costs more than the rest.
        if type(argument) is Tensor or isinstance(argument, Tensor):
            return argument
    return None
