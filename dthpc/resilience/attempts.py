"""What the attempts of a run did, read from its folder. Free of torch: status reads it on the login node."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.rundir import RunDir, read_json

_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Attempt:
    """One attempt: what it started with and, if anybody could still say so, how it ended."""

    number: int
    """Number of the attempt, from 0."""

    start: dict[str, Any]
    """`attempt.json`."""

    end: dict[str, Any] | None
    """`end.json`; `None` while the attempt lives, or if it vanished and no keeper has looked since."""

    progressed: bool = False
    """Whether it left a checkpoint that was not there before."""

    @property
    def chain(self) -> str | None:
        """What the attempts since one command of the user share; limits count within a chain."""
        return self.start.get("chain")

    @property
    def job_id(self) -> str | None:
        """The scheduler's job, `36_2` for a task of an array; `None` for local attempts."""
        return self.start.get("job_id")

    @property
    def cause(self) -> str | None:
        """Cause of its end, such as `preempted`; `None` while it lives."""
        return None if self.end is None else self.end.get("cause")

    @property
    def reason(self) -> str | None:
        """The cause in words."""
        return None if self.end is None else self.end.get("reason")

    @property
    def decision(self) -> str | None:
        """What was decided at its end: `finish`, `requeue`, `resubmit`, `restart` or `stop`."""
        return None if self.end is None else self.end.get("decision")


def read_attempts(run: RunDir) -> list[Attempt]:
    """All attempts of a run, in order."""
    folders = [run.attempt(number) for number in run.attempt_numbers()]
    starts = [_read_dict(folder.start) or {} for folder in folders]
    attempts = []
    for folder, start, later in zip(folders, starts, [*starts, {}][1:], strict=True):
        end = _read_dict(folder.end)
        # A rank may commit a checkpoint after the keeper had to write the end: what the next attempt found counts.
        progressed = _new(start, later) if "checkpoints" in later else bool(end and end.get("progressed"))
        attempts.append(Attempt(folder.number, start, end, progressed))
    return attempts


def _read_dict(path: Path) -> dict[str, Any] | None:
    stored = read_json(path)
    return stored if isinstance(stored, dict) else None


def _new(start: dict[str, Any], later: dict[str, Any]) -> bool:
    return bool(later["checkpoints"].items() - start.get("checkpoints", {}).items())


def of_chain(attempts: list[Attempt], chain: str) -> list[Attempt]:
    """The attempts that one command of the user led to."""
    return [attempt for attempt in attempts if attempt.chain == chain]


def attempts_without_progress(attempts: list[Attempt]) -> int:
    """How many of the last ended attempts in a row left no new checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        # Attempts that refused their nodes are bounded by the number of nodes.
        if attempt.end is None or attempt.cause == "bad_nodes":
            continue
        if attempt.progressed:
            break
        count += 1
    return count


def committed_checkpoints(folder: Path) -> dict[str, int]:
    """Names of the committed checkpoints, each with the inode of its folder.

    A checkpoint gets its name by the rename that commits it, so a name without `.partial` tells of a whole one. The
    inode tells one of that name from another that was made after the first had been removed.
    """
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {entry.name: entry.stat().st_ino for entry in entries if _CHECKPOINT.fullmatch(entry.name)}


def newest_step(checkpoints: dict[str, int]) -> int | None:
    """Highest step among committed checkpoints, or `None` if there is none."""
    steps = [int(match[1]) for name in checkpoints if (match := _CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)


def is_current(run: RunDir, attempt: int) -> bool:
    """Whether no later attempt has begun.

    A node that the scheduler gave up as lost may still write to the shared file system; whoever commits something that
    a later attempt builds on asks this first.
    """
    return not any(number > attempt for number in run.attempt_numbers())


def config_digest(run: RunDir) -> str:
    """Digest of the resolved configuration, so that `finished` counts only for the configuration that did finish."""
    try:
        return hashlib.sha256(run.config.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def is_finished(run: RunDir, attempts: list[Attempt]) -> bool:
    """Whether an attempt has brought the run, with its present configuration, to its end."""
    digest = config_digest(run)
    return any(
        attempt.cause == "finished" and attempt.end is not None and attempt.end.get("config_digest") == digest
        for attempt in attempts
    )
