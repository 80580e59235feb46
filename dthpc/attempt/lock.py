"""One keeper at a time: the lock of a run's folder, and how the lock of a dead keeper is recognised.

The folder may lie on a network file system, where `flock` is not always real. So the lock is a file that appears whole,
by a hard link, and that names its holder well enough for others to ask whether the holder still lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dthpc.errors import UserError
from dthpc.rundir import RunDir, read_json

JobEnded = Callable[[str], "bool | None"]
"""Tells whether a Slurm job has ended; `None` where Slurm does not say."""

_TRIES = 20
_DAMAGED_S = 5.0
"""Seconds after which a lock without content is no lock that a file system only shows too early."""


class DamagedLock(UserError):
    """A lock file that names nobody: it is empty, or not whole. A machine that goes down may leave it so."""

    def __init__(self, path: Path) -> None:
        """Name the file."""
        super().__init__(
            "the lock file has an unknown form (it is empty or damaged)",
            key="lock",
            value=path,
            instead=f"if no process of the run is alive: rm {path}",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.value,)


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str
    """Random; tells this lock from any other."""

    pid: int
    """Process id of the keeper."""

    pid_start: str
    """When that process began, in the kernel's ticks, since process ids are used again."""

    machine: str
    """Boot and process namespace in which the process id means something."""

    host: str
    """Name of the machine, for people."""

    job_id: str | None
    """Slurm job in which the keeper runs."""

    time: float
    """When the lock was taken, in Unix seconds."""

    @classmethod
    def myself(cls, env: Mapping[str, str] = os.environ) -> Holder:
        """This process as a holder."""
        return cls(
            token=uuid.uuid4().hex,
            pid=os.getpid(),
            pid_start=process_start(os.getpid()) or "",
            machine=machine_identity(),
            host=env.get("SLURMD_NODENAME") or socket.gethostname(),
            job_id=env.get("SLURM_JOB_ID"),
            time=time.time(),
        )

    def lives(self, my_job: str | None = None, job_ended: JobEnded | None = None) -> bool | None:
        """Whether the holder still runs; `None` where it can't be told from here.

        Args:
            my_job: the Slurm job of whoever asks. Slurm never runs a job twice at once, so a lock of the same job
                belongs to an earlier start of it.
            job_ended: asks Slurm about a job.
        """
        if self.job_id is not None and self.job_id == my_job:
            return False
        if self.machine == machine_identity():
            return process_start(self.pid) == self.pid_start
        if self.job_id is not None and job_ended is not None:
            ended = job_ended(self.job_id)
            return None if ended is None else not ended
        return None


class RunLock:
    """The lock of one run, held from `acquire` to `release`."""

    def __init__(self, run: RunDir, holder: Holder | None = None) -> None:
        """Prepare to lock a run's folder in the name of a holder: this process, unless another is given."""
        self._run = run
        self._path = run.lock
        self.holder = holder or Holder.myself()

    def acquire(self, job_ended: JobEnded | None = None) -> None:
        """Take the lock, from a dead holder too.

        Raises:
            UserError: another keeper holds it, or may hold it; or the folder can't be written.
        """
        draft = self._path.with_name(f".lock.{self.holder.token}")
        try:
            # On disk before it has its name, so that no crash leaves a lock that names nobody.
            with open(draft, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.holder), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"the run's folder can't be written ({error.strerror})", key="run.root", value=self._path.parent
            ) from error
        try:
            with _one_at_a_time(self._path):
                for _ in range(_TRIES):
                    with contextlib.suppress(FileExistsError):
                        os.link(draft, self._path)
                        return
                    self._remove_if_dead(job_ended)
        finally:
            draft.unlink(missing_ok=True)
        raise UserError("others keep taking this run's lock", key="run", value=self._path.parent)

    def _remove_if_dead(self, job_ended: JobEnded | None) -> None:
        try:
            found = read_holder(self._path)
        except DamagedLock as damaged:
            self._remove_damaged(damaged, job_ended)
            return
        if found is None:
            return  # released meanwhile
        alive = found.lives(self.holder.job_id, job_ended)
        if alive is not False:
            raise _held(self._run, found, certain=bool(alive))
        # Where `flock` is not real, two may find the same dead lock: the rename gives it to one of them. If a third has
        # put its own lock there in between, what was renamed is not what was read, and goes back.
        aside = self._path.with_name(f".lock.dead.{self.holder.token}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(aside)
            removed = _holder_if_whole(aside)
            if removed is not None and removed.token != found.token:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
            aside.unlink()

    def _remove_damaged(self, damaged: DamagedLock, job_ended: JobEnded | None) -> None:
        _refuse_if_in_use(self._run, damaged, self.holder.job_id, job_ended)
        print(f"dthpc: {self._path} is empty or damaged, and no keeper of the run lives; it is taken over", flush=True)
        aside = self._path.with_name(f".lock.dead.{self.holder.token}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(aside)
            if _holder_if_whole(aside) is not None:  # another one has put its own there in between
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
            aside.unlink()

    def still_mine(self) -> bool:
        """Whether nobody has taken the lock over, as a later start of the job does after this node was given up.

        A file system that does not answer takes nothing away, nor does a file that names nobody.
        """
        try:
            found = read_holder(self._path)
        except (OSError, DamagedLock):
            return True
        return found is not None and found.token == self.holder.token

    def release(self) -> None:
        """Give the lock back, if it is still this holder's."""
        with contextlib.suppress(OSError):
            if self.still_mine():
                self._path.unlink()


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Whoever judges and takes a lock is alone with it, where the file system knows `flock`."""
    with open(lock.with_name(".lock.guard"), "ab") as guard:
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock at a path; `None` if it is free.

    Raises:
        DamagedLock: the file names nobody.
        UserError: the file is not a lock of this program.
    """
    list(path.parent.iterdir())  # makes NFS clients look again
    stored = read_json(path)
    if stored is None:
        if path.exists() and (stored := read_json(path)) is None and path.exists():
            raise DamagedLock(path)
        if stored is None:
            return None
    try:
        return Holder(**stored)
    except TypeError as error:
        raise UserError(
            "the lock file has an unknown form",
            key="lock",
            value=path,
            instead="remove the file if no process of the run is alive",
        ) from error


def _holder_if_whole(path: Path) -> Holder | None:
    try:
        return read_holder(path)
    except DamagedLock:
        return None


def holder_by_attempt(run: RunDir) -> Holder | None:
    """The keeper that the newest attempt names, if nothing recorded the end of that attempt."""
    numbers = run.attempt_numbers()
    folder = run.attempt(numbers[-1]) if numbers else None
    start = read_json(folder.start) if folder is not None and not folder.end.exists() else None
    if not isinstance(start, dict):
        return None
    try:
        return Holder(
            token="",
            pid=int(start["pid"]),
            pid_start=str(start["pid_start"]),
            machine=str(start["machine"]),
            host=str(start["host"]),
            job_id=start.get("slurm_job_id"),
            time=float(start["time"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _refuse_if_in_use(run: RunDir, damaged: DamagedLock, my_job: str | None, job_ended: JobEnded | None) -> None:
    """Whether a lock that names nobody may be taken: not where a keeper lives, may live, or has just come.

    Raises:
        UserError: it may not.
    """
    holder = holder_by_attempt(run)
    alive = False if holder is None else holder.lives(my_job, job_ended)
    if holder is not None and alive:
        raise _held(run, holder, certain=True) from damaged
    with contextlib.suppress(FileNotFoundError):
        if alive is None or time.time() - run.lock.stat().st_mtime < _DAMAGED_S:
            raise damaged


def ensure_free(run: RunDir, job_ended: JobEnded | None = None) -> None:
    """Refuse to start a run that a living keeper has in hand; for the doors, before they launch anything.

    Raises:
        UserError: the run is already running, and where.
    """
    if not run.path.is_dir():
        return
    try:
        found = read_holder(run.lock)
    except DamagedLock as damaged:
        _refuse_if_in_use(run, damaged, None, job_ended)
        return
    if found is not None and found.lives(None, job_ended):
        raise _held(run, found, certain=True)


def _held(run: RunDir, holder: Holder, *, certain: bool) -> UserError:
    job = f" in Slurm job {holder.job_id}" if holder.job_id else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
    where = f"process {holder.pid} on {holder.host}{job}, since {since}"
    if certain:
        stop = f"scancel {holder.job_id}" if holder.job_id else f"kill {holder.pid}"
        return UserError(
            f"the run is already running: {where}",
            key="run",
            value=run.name,
            instead=f"wait for it, or end it with `{stop}`, or give this one another run.name",
        )
    return UserError(
        f"the run may be running: {where}; whether that process lives can't be seen from {socket.gethostname()}",
        key="run",
        value=run.name,
        instead=f"look there, and if it is gone: rm {run.lock}",
    )


def process_start(pid: int) -> str | None:
    """When a living process of this machine began, in clock ticks since boot; `None` if there is none.

    A zombie counts as dead: it only waits to be asked for its exit code.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ""
        return ""
    try:
        # The second field is the program's name in brackets and may hold blanks.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def machine_identity() -> str:
    """A text that two processes share exactly when process ids mean the same to both."""
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
