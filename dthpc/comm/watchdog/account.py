"""What a rank can say of itself when something hangs: its last calls, what its threads wait for, where they are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from dthpc.comm.watchdog.recorder import OWN_CODE, GroupInfo, Recorder
from dthpc.comm.watchdog.torch_record import TorchRecord

_FRAMES = 24

Call = dict[str, Any]
"""An `Entry.to_json`; a waiting one also has `waited_s`."""


@dataclass
class Account:
    """One rank at one moment; every field is a JSON value, as it is sent to rank 0 and written to a file."""

    rank: int
    """Number of the rank."""

    host: str
    """Its node."""

    step: int | None = None
    """Last step that it has done."""

    waiting: list[Call] = field(default_factory=list)
    """Calls that its threads wait for, the longest first."""

    calls: list[Call] = field(default_factory=list)
    """Its last calls, the oldest first."""

    torch_calls: list[Call] = field(default_factory=list)
    """Collectives as torch's own recorder numbers them, the oldest first."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Groups by name: `description` and `ranks`."""

    main: str = ""
    """Where its main thread is: `file:line in function`."""

    stacks: dict[str, list[str]] = field(default_factory=dict)
    """Where each thread is, the innermost frame last."""

    signal: str | None = None
    """Stop signal that it has received."""

    pid: int = field(default_factory=os.getpid)
    """Its process."""

    time: float = field(default_factory=time.time)
    """Unix seconds."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Account:
        """The reverse of `to_json`."""
        return cls(**values)


@dataclass(frozen=True)
class Witness:
    """Makes the accounts of this process."""

    rank: int
    """Number of the rank."""

    host: str
    """Its node."""

    recorder: Recorder | None
    """Its record; None where it keeps none."""

    torch_record: TorchRecord
    """torch's record."""

    step: Callable[[], int | None]
    """Tells the last step that was done."""

    def account(self, length: int | None = None, signal: str | None = None, failed: bool = False) -> Account:
        """What this rank does now. May be called by any thread, whatever the others are blocked in.

        Args:
            length: how many calls it holds at most; None: all that are remembered.
            signal: a stop signal that this rank has received.
            failed: whether calls that raised count as those that are waited for.
        """
        now = time.monotonic()
        stacks = _stacks()
        account = Account(self.rank, self.host, self.step(), stacks=stacks, signal=signal)
        account.main = next((_outside_torch(stack) for name, stack in stacks.items() if name == "MainThread"), "")
        account.groups = _groups(self.recorder)
        account.torch_calls = self.torch_record.read()[-(length or 0) :]
        if self.recorder is None:
            return account
        waits = sorted(self.recorder.waits(), key=lambda wait: wait.since)
        waits += self.recorder.failures()[-1:] if failed else []
        account.waiting = [
            {**wait.entry.to_json(now), "waited_s": round(now - wait.since, 3)} for wait in waits if wait.entry
        ]
        account.calls = [entry.to_json(now) for entry in list(self.recorder.entries)[-(length or 0) :]]
        return account


def _groups(recorder: Recorder | None) -> dict[str, dict[str, Any]]:
    """All groups of this rank, those included in which Python has called nothing yet."""
    infos = [GroupInfo(group) for group in list(distributed_c10d._world.pg_map)]
    infos += [] if recorder is None else recorder.groups()
    return {info.name: {"description": info.description, "ranks": info.ranks} for info in infos}


def _stacks() -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        lines: list[str] = []
        here: FrameType | None = frame
        while here is not None and len(lines) < _FRAMES:
            code = here.f_code
            lines.append(f"{code.co_filename}:{here.f_lineno} in {code.co_name}")
            here = here.f_back
        name = names.get(ident) or str(ident)
        found[name if name not in found else f"{name} {ident}"] = lines[::-1]
    return found


def _outside_torch(stack: list[str]) -> str:
    """The innermost frame of a stack that is not torch's or this room's."""
    users = [line for line in stack if not line.startswith(OWN_CODE)]
    return (users or stack or [""])[-1]
