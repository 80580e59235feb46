"""One rank: `python -m dthpc.attempt.rank RUN_DIR`, started by `srun` or by the local keeper.

The order of things matters. Stop signals are caught before anything slow is imported, so that a rank which is preempted
while it starts does not die of it; the numbers of threads are set before torch reads them; and whatever happens, the
rank leaves its own account of its end, because `srun` reports only one code for all.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.attempt.mpi_leftovers import remove_leftovers
from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.placement.identity import RankIdentity, from_environment
from dthpc.resilience.bad_nodes import BadNodes
from dthpc.resilience.outcome import EXIT_CRASH, EXIT_USER_ERROR, RankRecord, is_echo
from dthpc.resilience.stop import StopFlag, Stopped
from dthpc.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from dthpc.comm.rendezvous import Rendezvous
    from dthpc.comm.watchdog.session import Session, Settings
    from dthpc.comm.watchdog.watchdog import Ending
    from dthpc.context import RankContext
    from dthpc.placement.bind import Bound

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_TRACEBACK_LINES = 30
_EXIT_GUARD_S = 60.0
_LAST_WORDS_S = 0.5
"""Pause of a failed rank before its exit, by which `srun` ends the others, so that they can write their records too."""


def main(arguments: list[str]) -> int:
    """Run one rank to its end.

    Returns:
        0 finished, 75 stopped on request with its state saved, 2 user error. A crash does not return: it ends the
        process with 1 at once, since threads of a broken process group may never end.
    """
    stop = StopFlag().install()
    faulthandler.enable()
    try:
        run = RunDir(Path(arguments[0]))
        identity = from_environment(os.environ)
        plan = LaunchPlan.read(run)
        bound = place(plan, identity)
    except UserError as error:
        print(f"dthpc: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(plan.threads_per_rank)
    for path in remove_leftovers(os.environ):
        print(f"dthpc: removed {path}, left by an earlier start of this step", flush=True)
    return _Rank(run, identity, plan, stop, bound).live()


def place(plan: LaunchPlan, identity: RankIdentity) -> Bound | None:
    """Put this rank where the plan wants it on its node; `None` where the plan wants nothing.

    Raises:
        UserError: it can't be done, and `placement.strict` is set.
    """
    if not plan.placement:
        return None
    from dthpc.placement.bind import bind_rank

    return bind_rank(plan.placement, identity.local_rank, os.environ)


class _Rank:
    """The life of a rank, from its configuration to its exit record."""

    def __init__(
        self, run: RunDir, identity: RankIdentity, plan: LaunchPlan, stop: StopFlag, bound: Bound | None
    ) -> None:
        self.run = run
        self.identity = identity
        self.plan = plan
        self.stop = stop
        self.bound = bound
        self.meeting: Rendezvous | None = None
        self.context: RankContext | None = None
        self.session: Session | None = None
        self.refused = False

    def live(self) -> int:
        """Do the job, record how it ended, and take the process group down."""
        record = self._settle(self._do_job())
        record.write(self.run.attempt(self.identity.attempt))
        if record.cause in ("crash", "user_error"):
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_LAST_WORDS_S if self.session is not None else 0.0)
            os._exit(record.code)
        # Threads of the user's libraries may keep a process alive for ever; the record already tells how it ended.
        faulthandler.dump_traceback_later(_EXIT_GUARD_S, exit=True)
        self._take_down()
        return record.code

    def _do_job(self) -> RankRecord:
        try:
            config, job = self._prepare()
            job(config, self.context)
        except Stopped as stopped:
            return self._record("preempted", step=stopped.step)
        except UserError as error:
            print(f"dthpc: {error}", file=sys.stderr)
            return self._record("user_error", error=error.message())
        except BadNodes as refused:
            print(f"dthpc: {refused}", file=sys.stderr)
            self.refused = True
            return self._record("crash", error=str(refused))
        except BaseException as error:
            traceback.print_exc()
            lines = traceback.format_exc().rstrip().splitlines()
            summary = "".join(traceback.format_exception_only(type(error), error)).strip()
            return self._record("crash", error=" ".join(summary.split()), tail=lines[-_TRACEBACK_LINES:])
        return self._record("finished")

    def _settle(self, record: RankRecord) -> RankRecord:
        """Tell the other ranks' watchdogs how the job ended here, and learn whether this rank is to blame."""
        if self.session is None:
            return record
        # Bad nodes are refused by all ranks alike: none is to blame.
        if self.refused or record.cause in ("finished", "preempted"):
            self.session.watchdog.finished()
            return record
        error = record.error or ""
        ending = self.session.watchdog.failed(error, echo=record.cause == "crash" and is_echo(error))
        return record if ending is None else replace(record, error=ending.why, echo=True)

    def _end_by_watchdog(self, ending: Ending) -> None:
        """End this process for another rank's sake, from the watchdog's thread: the main thread may be blocked."""
        from dthpc.comm.watchdog.watchdog import say

        record = self._record("crash", error=ending.why)
        say(f"dthpc: rank {record.rank} is ended: {ending.why}")
        replace(record, echo=True).write(self.run.attempt(self.identity.attempt))
        time.sleep(_LAST_WORDS_S)
        os._exit(record.code)

    def _prepare(self) -> tuple[Any, Callable[..., Any]]:
        """Load the configuration, torch and the job, meet the other ranks, and fill the context."""
        loading = _ConfigLoader(self.run.config)
        import torch

        from dthpc.comm.start import Choice, start
        from dthpc.comm.watchdog.session import Settings, prepare
        from dthpc.context import RankContext
        from dthpc.jobs.build import find_target

        config = loading.result()
        job = find_target(config.job, "job")
        device = choose_device(self.plan, self.identity)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        choice = Choice.of(config.comm, device.type, self.identity.world_size, self.plan.nodes)
        attempt = self.run.attempt(self.identity.attempt)
        settings = Settings.of(config.comm)
        prepare(choice.decision.spec, attempt, settings)
        placed, near = self._placed()
        started = start(choice, self.identity, attempt, placed=placed, near=near)
        self.meeting = started.meeting
        self._prove_placement()
        decision = started.decision
        self.context = RankContext(
            self.identity, self.run, device, decision.spec, self.stop, axis_backends=decision.axis_specs()
        )
        if self.identity.rank == 0:
            self.context.events = self._open_events(started.record())
            for line in started.lines():
                print(f"dthpc: {line}", flush=True)
        self._watch(settings)
        return config, job

    def _placed(self) -> tuple[dict[str, str], list[str]]:
        """Variables that the placement has set, and the interfaces of the adapters that it gave this rank."""
        if self.bound is None:
            return {}, []
        nics = [choice.nic for choice in self.bound.place.nics] if self.bound.place is not None else []
        return dict(self.bound.settings.environment), [name for nic in nics for name in nic.interfaces or ()]

    def _watch(self, settings: Settings) -> None:
        """From here on a rank that dies, stops or does not come to a collective ends the job within seconds."""
        from dthpc.comm.watchdog.session import Session

        context = self.context
        assert self.meeting is not None
        assert context is not None
        if self.identity.world_size == 1:
            return
        self.session = Session(
            self.meeting,
            self.identity,
            context.attempt,
            settings,
            step=lambda: context.step,
            end=self._end_by_watchdog,
            events=context.events,
        )

    def _prove_placement(self) -> None:
        """Look whether this rank runs where it was placed, now that all threads are there, and write it down."""
        if self.bound is None:
            return
        attempt = self.run.attempt(self.identity.attempt)
        try:
            seen = self.bound.verify()
        finally:
            self.bound.write(attempt.path, self.identity.rank)
        if self.identity.rank == 0:
            print(self.bound.table(), flush=True)
        for problem in (*self.bound.problems, *map(str, seen.mismatches)):
            print(f"dthpc: placement: {problem}", file=sys.stderr, flush=True)

    def _open_events(self, network: dict[str, Any]) -> Any:
        from dthpc.monitor.events import EventLog

        assert self.meeting is not None
        assert self.context is not None
        events = EventLog(self.run.events, attempt=self.identity.attempt)
        events.write(
            "ranks_ready",
            world_size=self.identity.world_size,
            hosts=list(self.meeting.hosts),
            rendezvous=self.meeting.address,
            interface=self.meeting.interface or os.environ.get("GLOO_SOCKET_IFNAME"),
            **network,
        )
        return events

    def _record(
        self, cause: str, *, step: int | None = None, error: str | None = None, tail: list[str] | None = None
    ) -> RankRecord:
        if step is None and self.context is not None:
            step = self.context.step
        return RankRecord(
            rank=self.identity.rank,
            cause=cause,
            signal=self.stop.requested,
            error=error,
            traceback_tail=tail,
            step=step,
            host=self.identity.host,
        )

    def _take_down(self) -> None:
        import torch.distributed as dist

        from dthpc.comm.rendezvous import leave

        if self.meeting is not None:
            leave(self.meeting, self.identity)
        if self.session is not None:
            self.session.close()
        if self.context is not None and self.context.events is not None:
            self.context.events.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _ConfigLoader:
    """Reads the resolved configuration in a thread, while the main thread waits for torch to be read from disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, name="config")
        self._thread.start()

    def _load(self) -> None:
        try:
            from omegaconf import OmegaConf

            self._config = OmegaConf.load(self._path)
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        """The configuration.

        Raises:
            UserError: the file is absent or can't be read.
        """
        self._thread.join()
        if self._error is not None:
            raise UserError(
                f"the run's configuration can't be read: {self._error}",
                key="run",
                value=self._path,
                instead="submit the run again",
            ) from self._error
        return self._config


def choose_device(plan: LaunchPlan, identity: RankIdentity) -> torch.device:
    """Where this rank computes: its own GPU if the run asked for GPUs, else the CPU.

    A rank that sees one GPU takes it whatever its local rank is: `--gpus-per-task=1` shows each rank its own GPU as
    number 0.

    Raises:
        UserError: the ranks of this node see fewer GPUs than they need.
    """
    import torch

    if plan.gpus_per_node == 0:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if visible < identity.local_world_size:
        raise UserError(
            f"{identity.host} shows {visible} GPUs to {identity.local_world_size} ranks",
            key="cluster.gpus_per_node",
            value=plan.gpus_per_node,
            instead="at least as many GPUs as cluster.tasks_per_node, or cluster.gpus_per_node=0 for the CPU",
        )
    return torch.device("cuda", identity.local_rank)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = EXIT_CRASH
    sys.exit(code)
