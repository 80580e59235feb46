"""The watching of one rank as a whole: recorder, hooks, hub on rank 0, and the thread; from meeting to end."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dthpc.comm.rendezvous import Identity, Rendezvous
from dthpc.comm.watchdog.account import Witness
from dthpc.comm.watchdog.compare import Verdict
from dthpc.comm.watchdog.hooks import Hooks
from dthpc.comm.watchdog.hub import Hub
from dthpc.comm.watchdog.recorder import Recorder
from dthpc.comm.watchdog.torch_record import TorchRecord, export, nccl_variables, set_default_timeout
from dthpc.comm.watchdog.waiting import record_with, stop_recording
from dthpc.comm.watchdog.watchdog import Ending, Watchdog, say
from dthpc.comm.watchdog.wire import Line
from dthpc.rundir import AttemptDir, write_json

if TYPE_CHECKING:
    from dthpc.monitor.events import EventLog

_KEY = "dthpc/watchdog"
_CONNECT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Settings:
    """What the configuration says of it."""

    timeout_s: float
    """Seconds after which a collective is overdue."""

    silence_s: float = 60.0
    """Seconds without a sign of life after which a rank counts as lost; 0: never."""

    record: int = 1000
    """Calls that each rank remembers; 0: none."""

    @classmethod
    def of(cls, comm: Any) -> Settings:
        """Those of the `comm` group of a configuration, which may be older than this version."""
        return cls(
            float(comm.timeout_s),
            float(comm.get("silence_s", cls.silence_s)),
            int(comm.get("flight_record", cls.record)),
        )


def prepare(backend: str, attempt: AttemptDir, settings: Settings) -> None:
    """Give the time-out to all groups that will be made, and switch torch's recorders on; before the ranks meet."""
    set_default_timeout(settings.timeout_s)
    if "nccl" in backend and settings.record > 0:
        attempt.flight.mkdir(exist_ok=True)
        export(nccl_variables(attempt.flight / "nccl-rank-", settings.timeout_s, settings.record))


class Session:
    """All that watches this rank."""

    def __init__(
        self,
        meeting: Rendezvous,
        identity: Identity,
        attempt: AttemptDir,
        settings: Settings,
        *,
        step: Callable[[], int | None],
        end: Callable[[Ending], None],
        events: EventLog | None = None,
    ) -> None:
        """Begin to watch; all ranks do it, after they have met.

        Args:
            meeting: where they met.
            identity: which rank this is.
            attempt: the attempt's folder.
            settings: time-outs.
            step: tells the last step that this rank has done.
            end: called in another thread when this rank must end; does not return.
            events: the run's events, on rank 0.
        """
        self._attempt, self._events = attempt, events
        self._hub = None
        recorder = Recorder(settings.record) if settings.record > 0 else None
        self._hooks = None if recorder is None else Hooks(recorder)
        self._recorder = recorder
        if self._hooks is not None and recorder is not None:
            self._hooks.add(type(dist.group.WORLD))
            record_with(recorder)
        if identity.rank == 0:
            self._hub = Hub(identity.world_size, settings.silence_s, warn=self._warn, end=self._judge)
            meeting.store.set(_KEY, json.dumps({"port": self._hub.port, "word": self._hub.word}))
        where = json.loads(meeting.store.get(_KEY))
        line = Line(socket.create_connection((meeting.address, where["port"]), timeout=_CONNECT_TIMEOUT_S))
        line.send({"kind": "hello", "word": where["word"], "rank": identity.rank, "host": identity.host})
        self.watchdog = Watchdog(
            Witness(identity.rank, identity.host, recorder, TorchRecord(), step),
            line,
            attempt.flight,
            timeout_s=settings.timeout_s,
            silence_s=settings.silence_s,
            end=end,
        )

    def close(self) -> None:
        """Stop watching, and put everything back that was replaced."""
        self.watchdog.close()
        if self._hub is not None:
            self._hub.close()
        if self._hooks is not None and self._recorder is not None:
            self._hooks.remove()
            stop_recording(self._recorder)

    def _warn(self, verdict: Verdict) -> None:
        say(f"dthpc: {verdict.text()}")
        self._tell("slow collective", verdict)

    def _judge(self, verdict: Verdict) -> None:
        say(f"dthpc: {verdict.text()}")
        write_json(
            self._attempt.verdict,
            {"why": verdict.headline, "details": verdict.details, "blamed": verdict.blamed},
        )
        self._tell("ranks out of step", verdict)

    def _tell(self, what: str, verdict: Verdict) -> None:
        if self._events is not None:
            self._events.write("incident", what=what, why=verdict.headline)
