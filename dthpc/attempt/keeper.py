"""The keeper: one process for each start of a run, which starts its ranks and answers for how they end.

`python -m dthpc.attempt.keeper RUN_DIR`, or `--sweep FILE` with `{"runs": [folders]}`: a task of a job array takes the
one of its index, a local sweep takes them one after another. The batch script `exec`s it, so it is the batch shell;
it needs neither torch nor Hydra, since it starts again with every attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.attempt.inbox import SignalInbox
from dthpc.attempt.lock import Holder, RunLock
from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.processes import CHAIN_VARIABLE, Ranks, make_ranks, world_size_of
from dthpc.attempt.records import begin_attempt, close_lost_attempts, log_causes, write_end
from dthpc.errors import UserError
from dthpc.monitor.events import EventLog
from dthpc.resilience.attempts import Attempt, committed_checkpoints, is_finished, of_chain, read_attempts
from dthpc.resilience.bad_nodes import CAUSE as BAD_NODES
from dthpc.resilience.bad_nodes import Supply, decide_without, read_refusal, refused_before
from dthpc.resilience.decide import Decision, Limits, SchedulerState, decide, decide_at_start
from dthpc.resilience.outcome import EXIT_CRASH, EXIT_FINISHED, EXIT_USER_ERROR, Outcome, read_records, read_verdict
from dthpc.resilience.stop import EXIT_STOPPED
from dthpc.rundir import AttemptDir, RunDir

if TYPE_CHECKING:
    from dthpc.slurm.client import SlurmClient

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")

_STOPS = {"SIGTERM", "SIGINT", "SIGHUP"}
_LOOK_AT_LOCK_S = 5.0
_RECORDS_TIMEOUT_S = 5.0
_LAST_SHARE_OF_GRACE = 0.8
"""Once Slurm has told the batch shell to end, the keeper decides before the grace is over, whatever the ranks do."""


class Keeper:
    """Keeps one run: from its lock to the decision after its last attempt."""

    def __init__(self, run: RunDir, env: Mapping[str, str], inbox: SignalInbox) -> None:
        """Read the run's plan.

        Raises:
            UserError: the folder is no run.
        """
        self.run = run
        self.plan = LaunchPlan.read(run)
        self.env = env
        self.inbox = inbox
        self.lock = RunLock(run, Holder.myself(env))
        self.in_slurm = self.plan.kind != "local"
        self.chain = env.get(CHAIN_VARIABLE) or _new_chain(env, self.plan.kind, self.lock.holder)
        self.limits = limits_of(self.plan)
        self.events = EventLog(run.events)
        self.asked_to_stop = False

    def keep(self) -> int:
        """Make attempts until one decides to end here; the exit code tells how.

        Raises:
            UserError: another keeper has the run in hand, or its ranks can't be started.
        """
        self.lock.acquire(self._job_ended if self.in_slurm else None)
        try:
            close_lost_attempts(self.run, self.events)
            decision = self._decide_at_start()
            if decision is not None:
                print(f"dthpc: {decision.reason}", flush=True)
                return exit_code(decision)
            while True:
                folder = begin_attempt(self, world_size_of(self.plan, self.env))
                decision = _Attempt(self, folder).live()
                if decision is None or decision.action != "restart":
                    break
                if self._stopped_in_pause():
                    self.asked_to_stop = True
                    break
            return EXIT_CRASH if decision is None else exit_code(decision)
        finally:
            self.lock.release()

    def _decide_at_start(self) -> Decision | None:
        attempts = read_attempts(self.run)
        restarted = int(self.env.get("SLURM_RESTART_COUNT") or 0) > 0
        return decide_at_start(is_finished(self.run, attempts), of_chain(attempts, self.chain), restarted, self.limits)

    def _stopped_in_pause(self) -> bool:
        end = time.monotonic() + self.plan.restart_delay_s
        while True:
            if _STOPS & set(self.inbox.wait(max(0.0, end - time.monotonic()))):
                return True
            if time.monotonic() >= end:
                return False

    def _job_ended(self, job_id: str) -> bool | None:
        from dthpc.attempt.requeue import job_ended, make_client

        return job_ended(make_client(self.env), job_id)


class _Attempt:
    """One attempt, from the start of its ranks to the act that follows."""

    def __init__(self, keeper: Keeper, folder: AttemptDir) -> None:
        self.keeper = keeper
        self.folder = folder
        self.before = committed_checkpoints(keeper.run.checkpoints)
        self.signals: list[str] = []
        self.asked: str | None = None
        self.asked_at: float | None = None
        self.excluded: dict[str, str] = {}

    def live(self) -> Decision | None:
        """Run the ranks to their end, and act; `None` if a later attempt has taken the run over."""
        keeper = self.keeper
        ranks = make_ranks(keeper.run, keeper.plan, self.folder, keeper.env)
        try:
            ranks.start()
        except UserError as error:
            decision = Decision("user_error", "stop", error.message())
            write_end(keeper.run, self.folder, keeper.events, decision, {"progressed": False, "exit_codes": {}})
            raise
        recorder = threading.Thread(target=self._record_environment, daemon=True)
        recorder.start()
        if not self._watch(ranks):
            return None
        recorder.join(timeout=_RECORDS_TIMEOUT_S)
        outcome = self._outcome(ranks)
        state = self._scheduler_state()
        after = committed_checkpoints(keeper.run.checkpoints)
        progressed = bool(after.items() - self.before.items())
        history = [
            attempt
            for attempt in of_chain(read_attempts(keeper.run), keeper.chain)
            if attempt.number != self.folder.number
        ]
        refused = read_refusal(self.folder)
        if refused and not (state is not None and (state.requeued or not state.running)):
            decision = decide_without(refused, history, self._supply(refused, history), keeper.limits)
        else:
            decision = decide(outcome, history, progressed, keeper.limits, state)
        self.excluded = {**refused_before(history), **refused}
        extra = {
            "bad_nodes": refused,
            "progressed": progressed,
            "checkpoints": sorted(after),
            "requeued_by_slurm": bool(state and state.requeued),
            **outcome.to_json(),
        }
        write_end(keeper.run, self.folder, keeper.events, decision, extra)
        print(f"dthpc: attempt {self.folder.number}: {decision.reason} ({decision.action})", flush=True)
        return self._act(decision, state, extra, ranks)

    # --- while the ranks live ---------------------------------------------------------------------------------------

    def _watch(self, ranks: Ranks) -> bool:
        """Wait for the ranks, and hand signals on. False if the run has been taken over meanwhile."""
        look = time.monotonic() + _LOOK_AT_LOCK_S
        while not ranks.ended():
            for name in self.keeper.inbox.wait(1.0):
                self._on_signal(name, ranks)
            if self._grace_is_over(ranks):
                return True
            if time.monotonic() > look:
                look = time.monotonic() + _LOOK_AT_LOCK_S
                if not self.keeper.lock.still_mine():
                    print("dthpc: a later attempt has taken the run over; this one ends", flush=True)
                    ranks.kill()
                    return False
        return True

    def _on_signal(self, name: str, ranks: Ranks) -> None:
        self.signals.append(name)
        if self.keeper.plan.kind == "slurm":
            self._on_signal_of_slurm(name, ranks)
        elif name in ("SIGUSR1", "SIGUSR2") and self.asked is None:
            self.asked = "preempt"
            print("dthpc: asked to save and start again", flush=True)
            ranks.ask()
        elif name == "SIGINT" and self.asked == "stop":
            print("dthpc: interrupted twice; the ranks are killed", flush=True)
            ranks.kill()
        elif name in ("SIGTERM", "SIGINT", "SIGHUP") and self.asked != "stop":
            self.asked = "stop"
            self.keeper.asked_to_stop = True
            print("dthpc: asked to save and stop (SIGINT now: kill)", flush=True)
            ranks.ask()

    def _on_signal_of_slurm(self, name: str, ranks: Ranks) -> None:
        """What it means is asked of Slurm at the end; here the ranks are told, in case that only the batch shell was.

        So it is with `--signal=B:…` and `scancel --batch`. Ranks that have had their own signal ignore a second one.
        """
        if name == "SIGCONT":
            return
        ranks.ask()
        if name == "SIGTERM" and self.asked_at is None:
            self.asked_at = time.monotonic()

    def _grace_is_over(self, ranks: Ranks) -> bool:
        """Whether the decision can't wait for the ranks: Slurm will kill all soon, or they can't end by themselves."""
        if self.asked_at is None:
            return False
        plan = self.keeper.plan
        # The batch shell is told only when the steps' own grace is over, and then KillWait is left.
        grace_s = float((plan.site.get("learnt") or {}).get("kill_wait_s") or plan.grace_s)
        return time.monotonic() - self.asked_at > grace_s * _LAST_SHARE_OF_GRACE or bool(ranks.lost_nodes())

    def _record_environment(self) -> None:
        from dthpc.monitor.identity import write_environment

        write_environment(self.folder, self.keeper.env)

    # --- when they have ended ---------------------------------------------------------------------------------------

    def _supply(self, refused: Mapping[str, str], history: list[Attempt]) -> Supply:
        keeper = self.keeper
        if not keeper.in_slurm:
            return Supply(keeper.plan.nodes, None)
        from dthpc.attempt.exclude import supply_of
        from dthpc.attempt.requeue import make_client

        every = {**refused_before(history), **refused}
        return supply_of(make_client(keeper.env), keeper.plan, keeper.env, every)

    def _outcome(self, ranks: Ranks) -> Outcome:
        records = read_records(self.folder)
        # A network file system may show the records of other nodes a little late.
        end = time.monotonic() + _RECORDS_TIMEOUT_S
        while self.keeper.in_slurm and 0 < len(records) < ranks.world_size and time.monotonic() < end:
            if any(record.cause == "crash" for record in records.values()):
                break
            self.keeper.inbox.wait(0.1)
            records = read_records(self.folder)
        return Outcome(
            world_size=ranks.world_size,
            records=records,
            exit_codes=ranks.exit_codes(),
            asked=self.asked,
            signals=tuple(self.signals),
            log_causes=tuple(log_causes(self.folder)) if self.keeper.in_slurm else (),
            lost_nodes=tuple(ranks.lost_nodes()),
            last_words="" if len(records) == ranks.world_size else ranks.last_words(),
            srun_deaths=ranks.deaths(),
            verdict=read_verdict(self.folder),
        )

    def _scheduler_state(self) -> SchedulerState | None:
        if not self.keeper.in_slurm:
            return None
        from dthpc.attempt.requeue import make_client, scheduler_state

        return scheduler_state(make_client(self.keeper.env), self.keeper.env)

    def _act(self, decision: Decision, state: SchedulerState | None, extra: dict[str, Any], ranks: Ranks) -> Decision:
        """Do what was decided. Where it can't be done, the records are corrected to say so."""
        keeper = self.keeper
        if decision.action in ("requeue", "resubmit") and not (state is not None and state.requeued):
            try:
                self._continue(decision)
            except UserError as error:
                why = error.message()
                keeper.events.write("incident", attempt=self.folder.number, what="not continued", why=why)
                decision = Decision(decision.cause, "stop", f"{decision.reason}; but not continued: {why}")
                write_end(keeper.run, self.folder, keeper.events, decision, extra)
        # Ranks that still save have the rest of the grace; it is Slurm that ends it.
        while not ranks.ended():
            keeper.inbox.wait(1.0)
        return decision

    def _continue(self, decision: Decision) -> None:
        from dthpc.attempt.exclude import all_excluded
        from dthpc.attempt.requeue import RequeueForbidden, make_client, requeue, resubmit

        keeper = self.keeper
        client = make_client(keeper.env)
        avoided = all_excluded(keeper.plan, self.excluded) if self.excluded else []
        if decision.action == "requeue":
            try:
                requeue(client, keeper.env)
                if decision.cause == BAD_NODES:
                    self._leave_out(client, avoided)
                return
            except RequeueForbidden as forbidden:
                if keeper.plan.batch_script is None:
                    raise UserError(
                        f"Slurm does not requeue this job ({forbidden})",
                        key="cluster.requeue",
                        value="requeue",
                        instead="cluster.requeue=resubmit",
                    ) from forbidden
        job = resubmit(client, keeper.run, keeper.plan, keeper.env, keeper.chain, avoided)
        keeper.events.write("run_submitted", attempt=self.folder.number, job_id=job, launcher="continuation")
        print(f"dthpc: continues as job {job}", flush=True)

    def _leave_out(self, client: SlurmClient, nodes: list[str]) -> None:
        from dthpc.attempt.exclude import exclude_requeued

        try:
            exclude_requeued(client, self.keeper.env, nodes)
        except UserError as error:
            # It is queued all the same, and stops by itself if it is given the same nodes again.
            why = error.message()
            self.keeper.events.write("incident", attempt=self.folder.number, what="nodes not excluded", why=why)


def limits_of(plan: LaunchPlan) -> Limits:
    """What the plan allows."""
    return Limits(
        continue_by=plan.requeue,
        restart_on_failure=plan.restart_on_failure,
        max_attempts_without_progress=plan.max_attempts_without_progress,
        max_attempts=plan.max_attempts,
        save_lead_s=float(plan.site.get("save_lead_s") or 0.0),
    )


def exit_code(decision: Decision) -> int:
    """Exit code of the keeper, and so of the batch job: 0 only if the run is finished, so that `afterok` means that."""
    if decision.cause == "finished":
        return EXIT_FINISHED
    if decision.cause == "user_error":
        return EXIT_USER_ERROR
    return EXIT_CRASH if decision.cause in ("crash", "lost") else EXIT_STOPPED


def _new_chain(env: Mapping[str, str], kind: str, holder: Holder) -> str:
    # A requeued job keeps its id; a command typed into an allocation is one of several there.
    if kind == "slurm" and env.get("SLURM_JOB_ID"):
        return f"job-{env['SLURM_JOB_ID']}"
    return f"process-{holder.pid}-{holder.pid_start}"


def runs_of(arguments: list[str], env: Mapping[str, str]) -> list[RunDir]:
    """The runs that the command line names.

    Raises:
        UserError: the arguments have another form, or the sweep has no such task.
    """
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        return [RunDir(Path(arguments[0]))]
    if len(arguments) != 2 or arguments[0] != "--sweep":
        raise UserError("usage: python -m dthpc.attempt.keeper RUN_DIR | --sweep FILE")
    paths = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))["runs"]
    task = env.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return [RunDir(Path(path)) for path in paths]
    if not 0 <= int(task) < len(paths):
        raise UserError(f"the sweep has {len(paths)} runs", key="SLURM_ARRAY_TASK_ID", value=task)
    return [RunDir(Path(paths[int(task)]))]


def main(arguments: list[str]) -> int:
    """Keep the runs that the command line names; the exit code is that of the first that did not finish."""
    inbox = SignalInbox(SIGNALS)
    code = EXIT_FINISHED
    waiting: list[RunDir] = []
    try:
        waiting = runs_of(arguments, os.environ)
        while waiting:
            keeper = Keeper(waiting.pop(0), os.environ, inbox)
            kept = keeper.keep()
            code = code or kept
            # A sweep that was stopped does not begin its next run, even if this one finished, or nothing ran just then.
            stopped = kept == EXIT_STOPPED or keeper.asked_to_stop or _STOPS & set(inbox.wait(0.0))
            if waiting and stopped:
                code = code or EXIT_STOPPED
                _pass_over(waiting, "the sweep was stopped")
                break
    except UserError as error:
        print(f"dthpc: {error}", file=sys.stderr, flush=True)
        _pass_over(waiting, f"the sweep ended before it: {error.why}")
        return EXIT_USER_ERROR
    return code


def _pass_over(runs: list[RunDir], why: str) -> None:
    """Leave word in runs of a sweep that will not be begun."""
    for run in runs:
        with contextlib.suppress(OSError):
            EventLog(run.events).write("not_started", why=why)


if __name__ == "__main__":
    # A signal must not meet an interpreter that is already being torn down.
    result = main(sys.argv[1:])
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.exit(result)
