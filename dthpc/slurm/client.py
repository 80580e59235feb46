"""Runs Slurm's commands: bounded in time, patient with a busy controller, and plain about what went wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dthpc.errors import UserError
from dthpc.slurm.accounting import SACCT_COLUMNS, parse_sacct
from dthpc.slurm.listings import SQUEUE_COLUMNS, SlurmConfig, parse_squeue
from dthpc.slurm.records import JobRecord, PartitionRecord, parse_jobs, parse_partitions

T = TypeVar("T")

_TEMPORARY = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Connection refused|Connection timed out|Zero Bytes were"
    r"|Resource temporarily unavailable|temporarily unable|backup controller in standby|Connection reset"
    r"|Transport endpoint is not connected|Communication connection failure",
    re.IGNORECASE,
)
_UNREACHED = re.compile(r"Unable to contact slurm controller|Connection refused", re.IGNORECASE)
_UNKNOWN_JOB = re.compile(r"Invalid job id|No job found|does not exist", re.IGNORECASE)
_NO_CLUSTER = re.compile(r"could not establish a configuration source|unable to open .*slurm\.conf", re.IGNORECASE)
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|accounting_storage/none", re.IGNORECASE)
# Variables by which a user's shell changes what the commands print.
_FORMAT_VARIABLES = re.compile(r"(SQUEUE|SINFO|SACCT)_\w+|SLURM_TIME_FORMAT$")


class SlurmError(UserError):
    """One of Slurm's commands failed."""

    def __init__(self, command: Sequence[str], said: str, why: str, instead: str | None = None) -> None:
        """Describe the failure: the command, what it said, and what that means."""
        self.command = list(command)
        self.said = said.strip()
        told = f": {self.said}" if self.said else ""
        super().__init__(f"{why}{told}", key=" ".join(command), instead=instead)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.why, self.key, self.value, self.instead)


def _rebuild(why: str, key: str | None, value: object, instead: str | None) -> UserError:
    return UserError(why, key=key, value=value, instead=instead)


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    code: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        """All of it, as one line for a message."""
        return " | ".join(line.strip() for line in (self.errors + "\n" + self.output).splitlines() if line.strip())

    @property
    def temporary(self) -> bool:
        """Whether it failed because the controller was busy or away."""
        return self.code != 0 and bool(_TEMPORARY.search(self.errors))

    @property
    def unreached(self) -> bool:
        """Whether the controller certainly did not get the request, so that repeating it is safe for any command."""
        return self.code != 0 and bool(_UNREACHED.search(self.errors))


class SlurmClient:
    """Asks Slurm. Queries are repeated while the controller is busy; a request that changes something is not."""

    def __init__(
        self,
        timeout_s: float = 30.0,
        patience_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a client.

        Args:
            timeout_s: seconds after which one command is given up.
            patience_s: seconds over which a query is repeated while the controller does not answer.
            environment: the commands' environment; `None`: this process's.
            pause: waits some seconds between tries.
        """
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.environment = dict(os.environ if environment is None else environment)
        self._pause = pause
        self._children: set[subprocess.Popen[str]] = set()
        self._abandoned = False

    def find(self, command: str) -> str | None:
        """Path of a command, or `None`."""
        return shutil.which(command, path=self.environment.get("PATH"))

    def require(self, *commands: str) -> None:
        """Check that commands are there.

        Raises:
            UserError: some are not.
        """
        absent = [command for command in commands if self.find(command) is None]
        if absent:
            raise UserError(
                f"not found on PATH: {', '.join(absent)}; this is no Slurm login node, or its commands are not loaded",
                key="cluster.kind",
                value="slurm",
                instead="run `module load slurm` (or the site's equivalent), or leave out +cluster=… to train here",
            )

    def try_once(self, command: Sequence[str], timeout_s: float | None = None) -> Answer:
        """Run a command once; a time-out is an answer with code 124.

        Raises:
            UserError: the command is absent.
        """
        self.require(command[0])
        kept = {name: value for name, value in self.environment.items() if not _FORMAT_VARIABLES.match(name)}
        bound = self.timeout_s if timeout_s is None else timeout_s
        with subprocess.Popen(
            list(command),
            env={**kept, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as child:
            self._children.add(child)
            try:
                if self._abandoned:  # perhaps between the question and the start
                    child.kill()
                output, errors = child.communicate(timeout=bound)
            except subprocess.TimeoutExpired:
                child.kill()
                return Answer(124, "", f"Socket timed out: no answer within {bound:g} s")
            except BaseException:
                child.kill()
                raise
            finally:
                self._children.discard(child)
        return Answer(child.returncode, output, errors)

    def abandon(self) -> None:
        """Kill the commands that other threads wait for, and start no more: the user has left."""
        self._abandoned = True
        for child in list(self._children):
            child.kill()

    def query(self, command: Sequence[str]) -> Answer:
        """Run a command that changes nothing; repeat it, ever more slowly, while the controller does not answer."""
        return self.repeat(lambda: self.try_once(command), lambda answer: answer.temporary)

    def request(self, command: Sequence[str]) -> Answer:
        """Run a command that changes something; repeat it only when the controller certainly was not reached."""
        return self.repeat(lambda: self.try_once(command), lambda answer: answer.unreached)

    def repeat(self, once: Callable[[], Answer], again: Callable[[Answer], bool]) -> Answer:
        """Try something until it need not be tried again or patience ends, ever more slowly; the last answer."""
        give_up = time.monotonic() + self.patience_s
        delay = 0.5
        while True:
            answer = once()
            if self._abandoned or not again(answer) or time.monotonic() + delay > give_up:
                return answer
            self._pause(delay)
            delay = min(2 * delay, 10.0)

    def ask(self, command: Sequence[str]) -> str:
        """The output of a query.

        Raises:
            SlurmError: it failed, or the controller did not answer in time.
        """
        answer = self.query(command)
        if answer.temporary:
            why = f"Slurm's controller did not answer within {self.patience_s:g} s"
            raise SlurmError(command, answer.said, why, "try again later, or ask `scontrol ping` how it is")
        if _NO_CLUSTER.search(answer.said):
            instead = "work on a login node of the cluster, or set SLURM_CONF, or leave out +cluster=… to train here"
            raise SlurmError(command, "", "Slurm is installed on this machine, but it belongs to no cluster", instead)
        if answer.code != 0:
            raise SlurmError(command, answer.said, f"failed with code {answer.code}")
        return answer.output

    def config(self) -> SlurmConfig:
        """The cluster's settings.

        Raises:
            SlurmError: Slurm does not tell them.
        """
        return self._parsed(["scontrol", "show", "config"], SlurmConfig)

    def partitions(self) -> list[PartitionRecord]:
        """All partitions.

        Raises:
            SlurmError: Slurm does not tell them.
        """
        return self._parsed(["scontrol", "--oneliner", "show", "partition"], parse_partitions)

    def job(self, job_id: str) -> JobRecord | None:
        """One job, from the controller, the queue or accounting; `None` where none of them knows it."""
        return self.find_job(job_id)[0]

    def find_job(self, job_id: str) -> tuple[JobRecord | None, str]:
        """One job, and one line on how it was found or why it was not.

        Raises:
            SlurmError: Slurm failed to answer.
        """
        command = ["scontrol", "--oneliner", "show", "job", job_id]
        answer = self.query(command)
        if answer.code == 0 and "JobId=" in answer.output:
            jobs = self._read(command, answer.output, parse_jobs)
            return jobs[0], "told by the controller"
        if answer.temporary:
            raise SlurmError(command, answer.said, f"Slurm's controller did not answer within {self.patience_s:g} s")
        queued = self._queued([job_id])
        if queued:
            return next(iter(queued.values())), "told by the queue"
        found, note = self._accounted([job_id])
        return next(iter(found.values()), None), note

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        """The jobs that Slurm knows among some, by id: from the queue, and from accounting what has left it.

        Raises:
            SlurmError: Slurm failed to answer.
        """
        wanted = sorted(set(job_ids))
        if not wanted:
            return {}
        found = self._queued(wanted)
        missing = [job_id for job_id in wanted if job_id not in found]
        if missing:
            found = {**self._accounted(missing)[0], **found}
        return {job_id: found[job_id] for job_id in wanted if job_id in found}

    def cancel(self, job_id: str) -> None:
        """Cancel a job; one that has already ended is no error.

        Raises:
            SlurmError: Slurm refused.
        """
        command = ["scancel", job_id]
        answer = self.request(command)
        if answer.code != 0 and not _UNKNOWN_JOB.search(answer.errors):
            raise SlurmError(command, answer.said, f"failed with code {answer.code}")

    def _queued(self, job_ids: list[str]) -> dict[str, JobRecord]:
        form = "|".join(SQUEUE_COLUMNS.values())
        shown = ["--noheader", "--all", "--array", "--states=all", f"--format={form}"]
        command = ["squeue", *shown, f"--jobs={','.join(job_ids)}"]
        answer = self.query(command)
        if answer.code != 0:
            # A single id that left the controller's memory is an error to squeue; several are just not shown.
            if _UNKNOWN_JOB.search(answer.errors):
                return {}
            raise SlurmError(command, answer.said, f"failed with code {answer.code}")
        jobs = self._read(command, answer.output, lambda text: parse_squeue(text, list(SQUEUE_COLUMNS)))
        return {job.job_id: job for job in jobs}

    def _accounted(self, job_ids: list[str]) -> tuple[dict[str, JobRecord], str]:
        named = " ".join(job_ids)
        if self.find("sacct") is None:
            return {}, f"Slurm's controller no longer knows job {named}, and there is no sacct here to ask"
        columns = ",".join(SACCT_COLUMNS)
        shown = ["--noheader", "--parsable2", "--allocations", f"--format={columns}"]
        command = ["sacct", *shown, f"--jobs={','.join(job_ids)}"]
        answer = self.query(command)
        if _NO_ACCOUNTING.search(answer.said):
            off = "accounting is off (AccountingStorageType=accounting_storage/none)"
            return (
                {},
                f"Slurm's controller no longer knows job {named}, and {off}: only the run's own records tell more",
            )
        if answer.code != 0:
            raise SlurmError(command, answer.said, f"failed with code {answer.code}")
        found = self._read(command, answer.output, lambda text: parse_sacct(text, SACCT_COLUMNS))
        return found, "told by accounting" if found else f"neither Slurm's controller nor accounting knows job {named}"

    def _parsed(self, command: list[str], parse: Callable[[str], T]) -> T:
        return self._read(command, self.ask(command), parse)

    def _read(self, command: list[str], output: str, parse: Callable[[str], T]) -> T:
        """Parse an output; a failure shows the command and what it printed."""
        try:
            return parse(output)
        except (UserError, ValueError) as error:
            shown = output if len(output) < 2000 else output[:2000] + "…"
            raise SlurmError(command, shown, f"its output was not understood ({error}). It printed") from error
