"""How ranks ended, and what that says about the attempt. Free of torch: status reads it on the login node."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dthpc.resilience.stop import EXIT_STOPPED
from dthpc.rundir import AttemptDir, read_json, write_json

EXIT_FINISHED = 0
EXIT_CRASH = 1
EXIT_USER_ERROR = 2

CODES = {"finished": EXIT_FINISHED, "preempted": EXIT_STOPPED, "user_error": EXIT_USER_ERROR, "crash": EXIT_CRASH}
"""Exit code of a rank for each cause that it can tell itself."""

NO_RECORD = "no record"
"""In the place of a cause, for a rank that could not leave an account of its end."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's own account of its end, in `attempts/<n>/rank-XXXXX.json`.

    `srun` reports one code for all ranks, and after the first failure it is that of a killed peer. So each rank leaves
    its own account, and the first failure in time is the cause.
    """

    rank: int
    """Number of the rank."""

    cause: str
    """`finished`, `preempted` (asked to stop, state saved), `user_error` or `crash`."""

    signal: str | None = None
    """Stop signal that the rank had received."""

    error: str | None = None
    """The error in one line."""

    traceback_tail: list[str] | None = None
    """Last lines of the traceback of a crash."""

    step: int | None = None
    """Last step that was done."""

    time: float = field(default_factory=time.time)
    """When the rank ended, in Unix seconds."""

    host: str = field(default_factory=socket.gethostname)
    """Node of the rank."""

    echo: bool = False
    """Whether it ended only because of what another rank did, or did not do."""

    @property
    def code(self) -> int:
        """Exit code of the rank."""
        return CODES[self.cause]

    def write(self, attempt: AttemptDir) -> None:
        """Leave the record in the attempt's folder."""
        write_json(attempt.rank_exit(self.rank), {**asdict(self), "code": self.code})


def read_records(attempt: AttemptDir) -> dict[int, RankRecord]:
    """The records that the ranks of an attempt left, by rank."""
    records = {}
    for path in sorted(attempt.path.glob("rank-*.json")):
        stored = read_json(path)
        if isinstance(stored, dict) and stored.get("cause") in CODES:
            stored.pop("code", None)
            record = RankRecord(**stored)
            records[record.rank] = record
    return records


def read_verdict(attempt: AttemptDir) -> str:
    """Why collectives did not end, as the ranks' watchdogs left it; empty where they found nothing."""
    stored = read_json(attempt.verdict)
    return str(stored.get("why") or "") if isinstance(stored, dict) else ""


def first_failure(records: Iterable[RankRecord]) -> RankRecord | None:
    """The failure that came first in time; the later ones are usually its echo in the other ranks.

    One that its rank knows to be an echo comes after all others, whatever the clocks of the nodes say.
    """
    failures = [record for record in records if record.cause in ("crash", "user_error")]
    return min(failures, key=lambda record: (record.echo, record.time), default=None)


_ECHO = re.compile(
    r"connect|peer|broken pipe|socket|timed? ?out|time-out|nccl|gloo|remote process|end of file|take part", re.I
)
"""Words of errors by which a rank tells that another one is gone."""


def is_echo(error: str) -> bool:
    """Whether an error may be the consequence of another rank's end or absence."""
    return _ECHO.search(error) is not None


@dataclass(frozen=True)
class Death:
    """A rank that a signal ended before it could leave an account."""

    rank: int
    """Number of the rank."""

    signal: str
    """Name of the signal, or srun's words for it."""

    @property
    def error(self) -> str:
        """The same in words."""
        return f"killed by {self.signal}" + (" (out of memory?)" if self.signal == "SIGKILL" else "")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Outcome:
    """What the keeper saw of an attempt's end, before anybody is asked why."""

    world_size: int
    """Ranks that were started."""

    records: dict[int, RankRecord]
    """Accounts of the ranks that left one."""

    exit_codes: dict[str, int]
    """Exit codes of the processes that the keeper started: `{"srun": 143}`, or one entry for each local rank.
    Negative: the number of the signal that ended the process."""

    asked: str | None = None
    """What somebody asked of the keeper itself: `preempt`, `stop`, or nothing."""

    signals: tuple[str, ...] = ()
    """Signals that the keeper received, in order."""

    log_causes: tuple[str, ...] = ()
    """Causes that Slurm's lines in the logs name, in order; `cancelled` for a line that names none."""

    lost_nodes: tuple[str, ...] = ()
    """Nodes that vanished under the ranks."""

    last_words: str = ""
    """Last line that `srun` or a silent rank left."""

    srun_deaths: tuple[Death, ...] = ()
    """Ranks of which srun says that a signal ended them, in order, before it ended the others itself."""

    verdict: str = ""
    """Why collectives did not end, in one line, where the ranks' watchdogs found it out."""

    @property
    def all_finished(self) -> bool:
        """Whether every rank says that the run is finished."""
        return len(self.records) == self.world_size and all(
            record.cause == "finished" for record in self.records.values()
        )

    @property
    def silent(self) -> list[int]:
        """Ranks that left no record: killed, or never really started."""
        return [rank for rank in range(self.world_size) if rank not in self.records]

    @property
    def any_stopped(self) -> bool:
        """Whether a rank says that it stopped on request with its state saved."""
        return any(record.cause == "preempted" for record in self.records.values())

    @property
    def failure(self) -> RankRecord | None:
        """The first failure that a rank told."""
        return first_failure(self.records.values())

    @property
    def first_death(self) -> Death | None:
        """The rank that a signal ended without an account, if that came before all other failures.

        The others see a connection that breaks, and tell of it; so the records alone would blame a survivor. Where an
        error speaks of something else, it is the cause, and the death may be its echo (NCCL aborts, for instance).
        """
        death = self._silent_death()
        failure = self.failure
        if death is None or failure is None:
            return death
        echo = failure.cause == "crash" and (failure.echo or is_echo(failure.error or ""))
        return death if echo else None

    def _silent_death(self) -> Death | None:
        for name, code in self.exit_codes.items():
            number = name.removeprefix("rank ")
            if not number.isdigit() or code in (EXIT_FINISHED, EXIT_STOPPED):
                continue
            # In the order of their ends: whoever died after the first failure may have been ended because of it.
            silent = code < 0 and int(number) not in self.records
            return Death(int(number), signal_name(-code)) if silent else None
        return next((death for death in self.srun_deaths if death.rank not in self.records), None)

    def to_json(self) -> dict[str, Any]:
        """What `end.json` keeps of it."""
        failure, death = self.failure, self.first_death
        first = None if failure is None else {**asdict(failure), "code": failure.code}
        if death is not None:
            first = {"rank": death.rank, "cause": NO_RECORD, "error": death.error}
        return {
            "world_size": self.world_size,
            "exit_codes": self.exit_codes,
            "rank_codes": {str(rank): record.code for rank, record in sorted(self.records.items())},
            "asked": self.asked,
            "signals": list(self.signals),
            "lost_nodes": list(self.lost_nodes),
            "first_failure": first,
        }
