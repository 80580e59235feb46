"""torch's own flight recorder and time-outs: set up before a process group is made, and read while it works.

Variables are named as in torch 2.13's `ProcessGroupNCCL.hpp` and `FlightRecorder.hpp`, and by the names that 2.6 knows.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_DUMP_ALLOWANCE_S = 60
"""Seconds beyond a time-out in which NCCL's watchdog may still write its record before its monitor ends the process."""

_STALE = 0.9
"""Share of the seconds asked about in which nothing was completed, from which on the whole record is looked at."""

_PAUSE = 0.05
"""Share of them between two looks."""


def nccl_variables(target: Path, timeout_s: float, length: int) -> dict[str, str]:
    """Environment of NCCL's process groups.

    Args:
        target: what the names of the dumps begin with; torch adds the rank.
        timeout_s: seconds after which a collective is an error.
        length: calls that the recorder keeps.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": str(length),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(length),
        "TORCH_FR_DUMP_TEMP_FILE": str(target),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(target),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        # The monitor ends a process whose NCCL calls hang; before the time-out that would be too early.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(timeout_s) + _DUMP_ALLOWANCE_S),
    }


_ALIASES = (
    {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"},
    {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"},
)


def export(variables: dict[str, str]) -> dict[str, str]:
    """Set variables that the user has not exported, under this or their other name; returns those that were set."""
    exported = {name for name in variables if name in os.environ}
    taken = exported.union(*(names for names in _ALIASES if names & exported))
    new = {name: value for name, value in variables.items() if name not in taken}
    os.environ.update(new)
    return new


def set_default_timeout(timeout_s: float) -> None:
    """Have groups that are made without a time-out of their own, by anybody, take this one.

    torch's own default for them is half an hour (ten minutes with NCCL), whatever the group of all ranks has.
    """
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(distributed_c10d, name, None) is not None:
            setattr(distributed_c10d, name, timedelta(seconds=timeout_s))


class TorchRecord:
    """Collectives as torch's own recorder knows them, those that were started in C++ included."""

    def __init__(self) -> None:
        """Find the recorder; versions of torch that have none are silent."""
        from torch._C import _distributed_c10d

        self._dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
        self._last: tuple[Any, float] = (None, time.monotonic())

    def read(self) -> list[dict[str, Any]]:
        """The collectives that it remembers, the oldest first, in the form of `Entry.to_json`."""
        return [_entry(entry) for entry in self._load(True).get("entries") or ()]

    def overdue(self, seconds: float) -> dict[str, Any] | None:
        """The oldest collective that is not done and was started longer ago than that; None: there is none.

        Cheap as long as collectives go on: only where nothing has been completed for that long are they looked at.
        """
        status = self._load(False).get("pg_status")
        now = time.monotonic()
        if status != self._last[0]:
            self._last = status, now
        elif now - self._last[1] > seconds * _STALE:
            # The whole record may be long: the next look is not at once.
            self._last = status, now - seconds * (_STALE - _PAUSE)
            late = [entry for entry in self.read() if entry["state"] == "in flight" and entry["age_s"] > seconds]
            return late[0] if late else None
        return None

    def _load(self, collectives: bool) -> dict[str, Any]:
        if self._dump is None:
            return {}
        try:
            found = json.loads(self._dump(collectives, False))
        except (RuntimeError, TypeError, ValueError):  # a form of another version
            return {}
        return found if isinstance(found, dict) else {}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    names = entry.get("process_group") or ["", ""]
    shapes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    done = entry.get("retired") or entry.get("state") == "completed"
    age = time.time() - float(entry.get("time_created_ns") or 0) / 1e9
    number = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    return {
        "group": str(names[0]),
        "operation": str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", "")),
        "sequence": int(entry.get(number) or 0),
        "peer": None,
        "shape": list(shapes[0]) if shapes else None,
        "dtype": str(dtypes[0]).lower() if dtypes else None,
        "state": "finished" if done else "in flight",
        "age_s": round(age, 3),
        "place": "",
    }
