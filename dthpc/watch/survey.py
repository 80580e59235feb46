"""Collects what disk, processes and Slurm say of runs. Reads only; cheap for hundreds of runs, safe on torn files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dthpc.attempt.lock import DamagedLock, holder_by_attempt, process_start, read_holder
from dthpc.checkpoint.manifest import latest_verified
from dthpc.errors import UserError
from dthpc.monitor.progress import KINDS, Progress, fold
from dthpc.monitor.tail import LIMIT, read_tail
from dthpc.monitor.units import integer, number, text
from dthpc.resilience.attempts import Attempt, is_finished, read_attempts
from dthpc.resilience.outcome import EXIT_FINISHED, NO_RECORD, first_failure, read_records, signal_name
from dthpc.resilience.stop import EXIT_STOPPED
from dthpc.rundir import AttemptDir, RunDir, read_json
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.records import JobRecord
from dthpc.watch.report import AttemptReport, CheckpointReport, FailureReport, PendingReport, RunReport
from dthpc.watch.state import Evidence, Keeper, judge, recorded_end

LOG_LINES = 12
"""Last lines of a failed rank's log that are shown."""

_MARKS = ("launch.json", "events.jsonl", "attempts")
_SUBMIT_S = 60.0
_KEEPER_FIRST_S = 5.0
_SHORT_SEARCH = 1024 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

T = TypeVar("T")


class Jobs(Protocol):
    """The part of `SlurmClient` that is needed here."""

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        """The jobs that Slurm knows among some, by id, in one query."""
        ...

    def job(self, job_id: str) -> JobRecord | None:
        """One job with everything that the controller tells of it."""
        ...


@dataclass
class _Notes:
    """What one run's folder says, before Slurm is asked."""

    run: RunDir
    report: RunReport
    progress: Progress = field(default_factory=Progress)
    events: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    @property
    def last(self) -> AttemptReport | None:
        """The newest attempt."""
        return self.report.attempts[-1] if self.report.attempts else None

    @property
    def over(self) -> bool:
        """Whether the run's own records say that it has ended."""
        return recorded_end(self.last, self.report.awaits_start) is not None


def quick_client() -> SlurmClient:
    """Slurm, asked with little patience: whoever looks at a run should not wait for a controller that is away."""
    return SlurmClient(timeout_s=10.0, patience_s=2.0)


def find_runs(root: Path) -> list[RunDir]:
    """The runs under a folder, by name; none where it is absent.

    Raises:
        UserError: the folder can't be read.
    """
    try:
        entries = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"can't be read: {error.strerror}", key="--root", value=root) from error
    return [RunDir(path) for path in sorted(entries) if is_run(path)]


def is_run(path: Path) -> bool:
    """Whether a folder is one of a run, by what it holds; one that can't be looked into counts as a run too."""
    try:
        return any((path / mark).exists() for mark in _MARKS)
    except PermissionError:
        return True


def survey(
    runs: Sequence[RunDir], slurm: Jobs | None, *, detail: bool = False, full_verify: bool = False
) -> list[RunReport]:
    """Reports on runs, with one query to Slurm for all of them.

    Args:
        runs: the runs.
        slurm: whom to ask for jobs; `None`: nobody, the records alone are judged.
        detail: look further back in the records, and for the log of a failed rank.
        full_verify: verify every checksum of the newest checkpoint instead of names and sizes.
    """
    notes = [_read(run, detail) for run in runs]
    # Slurm need not be troubled about the hundreds that have long ended, unless one of them is looked at.
    wanted = [note.report.job_id for note in notes if note.report.kind == "slurm" and (detail or not note.over)]
    jobs, trouble = _ask(slurm, [job_id for job_id in wanted if job_id is not None], detail)
    now = time.time()
    for note in notes:
        _judge(note, jobs, trouble, now)
        _add_checkpoint(note, full_verify)
        if note.report.state in ("failed", "lost", "requeued", "held") or detail:
            _guard(note.report, note.run.attempts, partial(_add_failure, note, detail))
        _explain(note.report)
    return [note.report for note in notes]


def progress_of(run: RunDir, limit: int = LIMIT) -> tuple[Progress, list[dict[str, Any]], int]:
    """What the ends of a run's events add up to, those events, and the offset to read on from.

    Raises:
        OSError: the events can't be read.
    """
    tail = read_tail(run.events, KINDS, limit=limit)
    return fold(tail.events), tail.events, tail.offset


def _read(run: RunDir, detail: bool) -> _Notes:
    note = _Notes(run, RunReport(name=run.name, path=str(run.path)))
    report = note.report
    limit = LIMIT if detail else _SHORT_SEARCH
    note.progress, note.events, _ = _guard(report, run.events, lambda: progress_of(run, limit)) or (Progress(), [], 0)
    attempts = _guard(report, run.attempts, lambda: read_attempts(run)) or []
    report.attempts = [_attempt(attempt) for attempt in attempts]
    plan = _guard(report, run.launch, lambda: read_json(run.launch))
    progress = note.progress
    last = note.last
    report.job_id = progress.job_id or (last.job_id if last else None)
    report.kind = text(plan.get("kind")) if isinstance(plan, dict) else progress.launcher
    report.submitted = progress.submitted
    report.awaits_start = progress.submitted is not None and not _begun(progress, last)
    note.finished = bool(report.awaits_start and _guard(report, run.config, lambda: is_finished(run, attempts)))
    return note


def _judge(note: _Notes, jobs: dict[str, JobRecord] | None, trouble: str | None, now: float) -> None:
    report, progress = note.report, note.progress
    job = (jobs or {}).get(report.job_id or "")
    verdict = judge(
        Evidence(
            kind=report.kind,
            last=note.last,
            awaits_start=report.awaits_start,
            already_finished=note.finished,
            stop_signal=progress.stop_signal,
            trains=progress.trains,
            trained=progress.train_end is not None,
            not_started=progress.not_started,
            last_words=_guard(report, note.run.submissions, partial(_last_words, note)),
            keeper=_keeper(note) if report.kind != "slurm" else Keeper.UNKNOWN,
            job_id=report.job_id,
            job=job,
            slurm_answered=jobs is not None,
            slurm_trouble=trouble,
        )
    )
    report.state, report.why, report.conflict = verdict.state, verdict.why, verdict.conflict
    for name in ("step", "total_steps", "loss", "eval_step", "eval_loss", "bits_per_byte", "bigram_bits_per_byte"):
        setattr(report, name, getattr(progress, name))
    report.unit, report.tokens_per_s, report.step_time = progress.unit, progress.tokens_per_s, progress.step_time
    report.updated, report.summary = progress.last_time, progress.train_end
    if report.state == "running":
        report.eta_s, report.silent_s = progress.eta(now), progress.stalled_for(now)
    if job is not None:
        report.job_state = job.state
        if report.state in ("pending", "requeued", "held"):
            report.pending = PendingReport(job.reason, _moment(job.start_time))


def _begun(progress: Progress, last: AttemptReport | None) -> bool:
    """Whether the newest attempt belongs to the newest submission.

    The order of their events does not tell: a keeper may have begun before its submitter wrote that there is one.
    """
    if last is None:
        return False
    if progress.attempt is None or last.number > progress.attempt:
        return True
    if progress.keeper_pid is not None:
        return last.pid == progress.keeper_pid
    return progress.submitted_job is not None and last.job_id == progress.submitted_job


def _last_words(note: _Notes) -> str | None:
    """What a keeper of this machine printed last since the newest submission, if it made no attempt for it."""
    submitted = note.progress.submitted
    if note.report.kind == "slurm" or not note.report.awaits_start or submitted is None:
        return None
    log = note.run.submissions / "keeper.log"
    # The keeper may be quicker than whoever writes that it was submitted.
    if not log.exists() or log.stat().st_mtime < submitted - _KEEPER_FIRST_S:
        return None
    lines = last_lines(log, LOG_LINES)
    # A message of its own may be followed by lines of its traceback, or be one of many lines.
    said = [line for line in lines if line.startswith("dthpc: ")] or lines
    return said[-1].removeprefix("dthpc: ") if said else None


def _keeper(note: _Notes) -> Keeper:
    """Whether the keeper of the run lives; one that has just started, or keeps other runs of a sweep first, does."""
    found = _lock_holder(note)
    submitted, pid = note.progress.submitted, note.progress.keeper_pid
    gone = found is Keeper.GONE and note.report.awaits_start
    if gone and submitted is not None and pid is not None and is_keeper(pid, submitted):
        return Keeper.ALIVE
    return found


def is_keeper(pid: int, submitted: float) -> bool:
    """Whether a process is the living keeper of a submission, by when both began."""
    began = process_began(pid)
    return began is not None and submitted - _SUBMIT_S < began < submitted + 1


def process_began(pid: int) -> float | None:
    """When a living process of this machine began, in Unix seconds; `None` if there is none."""
    ticks = process_start(pid)
    try:
        stat = Path("/proc/stat").read_text(encoding="ascii")
        boot = next(float(line.split()[1]) for line in stat.splitlines() if line.startswith("btime "))
        return boot + float(ticks) / os.sysconf("SC_CLK_TCK") if ticks is not None else None
    except (OSError, ValueError, StopIteration):
        return None


def _lock_holder(note: _Notes) -> Keeper:
    try:
        found = _guard(note.report, note.run.lock, lambda: keeper_of(note.run)[0])
    except UserError as error:
        note.report.unreadable.append(error.message())
        found = None
    return Keeper.UNKNOWN if found is None else found


def _explain(report: RunReport) -> None:
    """Put the first error into the one line of a run that failed, where the keeper's reason does not hold it."""
    failure = report.failure
    if report.state == "running" and report.silent_s is not None:
        report.why = f"no news for {report.silent_s:.0f} s"
    if report.state not in ("failed", "lost") or failure is None or failure.error is None:
        return
    error = text(failure.error) or ""  # on one line, as the keeper's reason is
    if error not in (report.why or ""):
        where = f"rank {failure.rank}" + (f" on {failure.host}" if failure.host else "")
        report.why = f"{where}: {error}" + (f" ({report.why})" if report.why else "")


def _add_checkpoint(note: _Notes, full: bool) -> None:
    def look() -> None:
        found, rejected = latest_verified(note.run.checkpoints, quick=not full)
        note.report.rejected = [f"{each.checkpoint.path.name}: {each.why}" for each in rejected]
        if found is not None:
            note.report.checkpoint = CheckpointReport(found.step, str(found.path), "full" if full else "quick")
            if note.report.ended and note.report.step is not None:
                # Not every step has a record of its own.
                note.report.step = max(note.report.step, found.step)

    _guard(note.report, note.run.checkpoints, look)


def _add_failure(note: _Notes, detail: bool) -> None:
    if not note.report.attempts:
        return
    attempt = note.run.attempt(note.report.attempts[-1].number)
    record = first_failure(read_records(attempt).values())
    killed = _killed_first(attempt)
    if killed is not None:
        note.report.failure = killed
    elif record is None:
        note.report.failure = _silent_failure(attempt, note.report.attempts[-1].cause)
    else:
        note.report.failure = FailureReport(
            attempt=attempt.number,
            rank=record.rank,
            cause=record.cause,
            host=record.host,
            error=record.error,
            step=record.step,
            log=str(attempt.rank_log(record.rank)),
        )
    if detail and note.report.failure is not None and note.report.failure.log is not None:
        note.report.failure.log_tail = last_lines(Path(note.report.failure.log), LOG_LINES)


def _killed_first(attempt: AttemptDir) -> FailureReport | None:
    """The rank of which the keeper says that it was killed before the others failed for want of it."""
    end = read_json(attempt.end)
    first = end.get("first_failure") if isinstance(end, dict) else None
    if not isinstance(first, dict) or first.get("cause") != NO_RECORD or integer(first.get("rank")) is None:
        return None
    rank = int(first["rank"])
    return FailureReport(
        attempt.number, rank, NO_RECORD, error=text(first.get("error")), log=str(attempt.rank_log(rank))
    )


def _silent_failure(attempt: AttemptDir, cause: str | None) -> FailureReport | None:
    """The failure of an attempt whose ranks left no account: what the keeper saw, and where to look."""
    if cause in (None, "finished", "stopped", "cancelled"):
        return None
    srun_log = attempt.path / "srun.log"
    if srun_log.exists():
        return FailureReport(attempt.number, None, NO_RECORD, log=str(srun_log)) if cause == "crash" else None
    end = read_json(attempt.end)
    codes = end.get("exit_codes") if isinstance(end, dict) else None
    for name, code in codes.items() if isinstance(codes, dict) else ():
        rank = integer(name.removeprefix("rank "))
        if rank is not None and code not in (EXIT_FINISHED, EXIT_STOPPED):
            error = f"killed by {signal_name(-code)}" if isinstance(code, int) and code < 0 else f"exit code {code}"
            log = attempt.rank_log(rank)
            return FailureReport(attempt.number, rank, NO_RECORD, error=error, log=str(log))
    return None


def last_lines(path: Path, count: int, most_bytes: int = 64 * 1024) -> list[str]:
    """The last lines of a text, free of control characters, which might do anything to a terminal.

    A file that is absent has none.
    """
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - most_bytes))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    lines = [_CONTROL.sub("", line.rstrip().rpartition("\r")[2]).expandtabs(4) for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def _ask(slurm: Jobs | None, job_ids: list[str], detail: bool) -> tuple[dict[str, JobRecord] | None, str | None]:
    """The jobs that Slurm knows, or `None` and why it did not answer."""
    if not job_ids or slurm is None:
        return None, "Slurm was not asked"
    try:
        jobs = slurm.jobs(job_ids)
        for job_id, job in jobs.items() if detail else ():
            if job.state == "PENDING":
                # The queue's listing lacks the expected start.
                jobs[job_id] = slurm.job(job_id) or job
        return jobs, None
    except UserError as error:
        # Of all that Slurm printed, the last message is the one that says what failed.
        return None, error.why.split(" | ")[-1].partition(";")[0]


def _guard(report: RunReport, path: Path, read: Callable[[], T]) -> T | None:
    """What `read` gives, or nothing and a note where the file belongs to somebody else or the disk fails."""
    try:
        return read()
    except OSError as error:
        report.unreadable.append(f"{error.filename or path}: {error.strerror}")
        return None


def _moment(text: str | None) -> float | None:
    """Unix seconds of a local time as Slurm prints it."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def job_ids(run: RunDir) -> set[str]:
    """Ids of all Slurm jobs that a run had, as far as its records can be read."""
    note = _read(run, detail=False)
    known = {attempt.job_id for attempt in note.report.attempts} | {note.report.job_id}
    return {job_id for job_id in known if job_id is not None}


def keeper_of(run: RunDir) -> tuple[Keeper, int | None]:
    """Whether a keeper holds a run, and its process id where that means something on this machine.

    Raises:
        OSError: the lock can't be read.
        UserError: the lock is not one of this program.
    """
    if not run.path.is_dir():
        return Keeper.GONE, None
    try:
        holder = read_holder(run.lock)
    except DamagedLock:
        holder = holder_by_attempt(run)
    if holder is None:
        return Keeper.GONE, None
    lives = holder.lives()
    if lives is None:
        return Keeper.UNKNOWN, None
    return (Keeper.ALIVE, holder.pid) if lives else (Keeper.GONE, None)


def _attempt(attempt: Attempt) -> AttemptReport:
    return AttemptReport(
        number=attempt.number,
        job_id=text(attempt.job_id),
        pid=integer(attempt.start.get("pid")),
        restart_count=integer(attempt.start.get("restart_count")),
        nodes=_nodes(attempt.start.get("nodes")),
        started=number(attempt.start.get("time")),
        ended=number((attempt.end or {}).get("time")),
        cause=text(attempt.cause),
        decision=text(attempt.decision),
        reason=text(attempt.reason),
        progressed=attempt.progressed,
    )


def _nodes(value: object) -> list[str]:
    return [str(node) for node in value] if isinstance(value, list) else []
