"""The processes of an attempt: `srun`, or the ranks themselves on this machine. Both look alike to the keeper."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from dthpc.attempt.mpi_wiring import MpiWiring, Wires, close_descriptors, without_outer, without_outer_mpi
from dthpc.attempt.order import order_words
from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.resilience.outcome import EXIT_FINISHED, Death
from dthpc.resilience.stop import EXIT_STOPPED, die_with_parent
from dthpc.rundir import AttemptDir, RunDir

PEER_GRACE_S = 10.0
"""Seconds that the other ranks get for their last words after one has died."""

CHAIN_VARIABLE = "DTHPC_CHAIN"
"""Tells a continuation which command of the user it goes back to."""

_NODE_FAILURE = re.compile(r"error: Node failure on (\S+)")

# `strsignal` of the task's end, as srun prints it; Slurm itself adds the case of the memory limit.
_SIGNALS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
    "Out Of Memory": "the memory limit",
}
_DEATH = re.compile(rf"error: \S+: tasks? ([\d,-]+): ({'|'.join(_SIGNALS)})")
_ABORT = re.compile(r"\bAbort\(-?\d+\)|MPI_ABORT was invoked|called MPI_Abort")
_ENDS_STEP = re.compile(r"srun: .*(?:Terminating|Job step aborted|got SIG|forcing)|\*\*\* (?:JOB|STEP) |Node failure")

_OUTER = (
    CHAIN_VARIABLE,
    "DTHPC_RANK",
    "DTHPC_WORLD_SIZE",
    "DTHPC_LOCAL_RANK",
    "DTHPC_LOCAL_WORLD_SIZE",
    "DTHPC_NODE_RANK",
    "DTHPC_NODES",
)
"""Variables of the keeper, or of an outer rank that started it, which would mislead the ranks."""


class Ranks(Protocol):
    """What the keeper asks of an attempt's processes."""

    world_size: int
    """Number of ranks."""

    def start(self) -> None:
        """Start them."""

    def ended(self) -> bool:
        """Whether all have ended; also does what the death of one asks for."""

    def ask(self) -> None:
        """Ask all ranks to save their state and end."""

    def kill(self) -> None:
        """End them now."""

    def lost_nodes(self) -> list[str]:
        """Nodes that vanished under the ranks; the others wait for theirs in vain."""

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the processes that the keeper started; negative: number of a signal."""

    def deaths(self) -> tuple[Death, ...]:
        """Ranks that a signal ended, where the exit codes do not tell."""

    def last_words(self) -> str:
        """Last line that tells why a rank ended, where it left no record."""


def rank_environment(plan: LaunchPlan, attempt: AttemptDir, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of ranks: this process's, the plan's on top, and the attempt's number."""
    inherited = {name: value for name, value in env.items() if name not in _OUTER}
    own = {"DTHPC_ATTEMPT": str(attempt.number), "PYTHONUNBUFFERED": "1"}
    return {**inherited, **plan.environment, **own}


class LocalRanks:
    """The ranks as children of the keeper."""

    def __init__(self, run: RunDir, plan: LaunchPlan, attempt: AttemptDir, env: Mapping[str, str]) -> None:
        self.world_size = world_size_of(plan, env)
        self._run = run
        self._plan = plan
        self._attempt = attempt
        # Where an outer `mpiexec`, or a shell below one, ran the command, its ranks are not these.
        self._env = rank_environment(plan, attempt, without_outer_mpi(env))
        self._wiring = self._make_wiring()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._deaths: dict[int, int] = {}
        self._survivors: set[int] = set()
        self._kill_at: float | None = None

    def _make_wiring(self) -> MpiWiring | None:
        """What lets the ranks find each other by MPI, where the plan wants that."""
        command = self._plan.mpi.get("launcher")
        if not command:
            return None
        self._env = without_outer(self._env)
        return MpiWiring(command, self.world_size, self._env, self._attempt.path / "mpiexec.log")

    def start(self) -> None:
        """Start one process a rank, each in a session of its own, with its own log."""
        wires = [Wires()] * self.world_size if self._wiring is None else self._wiring.start()
        try:
            for rank, each in enumerate(wires):
                self._start_rank(rank, each)
        finally:
            close_descriptors(wires)

    def _start_rank(self, rank: int, wires: Wires) -> None:
        env = {
            **self._env,
            **wires.environment,
            "DTHPC_RANK": str(rank),
            "DTHPC_WORLD_SIZE": str(self.world_size),
            "DTHPC_LOCAL_RANK": str(rank),
            "DTHPC_LOCAL_WORLD_SIZE": str(self.world_size),
        }
        with open(self._attempt.rank_log(rank), "ab") as log:
            command = [*self._plan.rank_command, str(self._run.path)]
            self._processes.append(_spawn(command, env, signal.SIGKILL, log, wires.descriptors))

    def ended(self) -> bool:
        """Whether all have ended. One that died ends the others: they would wait for it until a time-out."""
        # From the last to the first and then again: whoever died before one that is found dead is found dead too.
        for process in reversed(self._processes):
            process.poll()
        codes = [process.poll() for process in self._processes]
        # Of those that died since the last look, a killed one first: the others may have failed for want of it.
        for rank, code in sorted(enumerate(codes), key=lambda item: item[1] is None or item[1] >= 0):
            if code is not None and rank not in self._deaths:
                # What a rank leaves behind, such as data-loader workers; once, since its process id is free now.
                _kill_group(self._processes[rank])
                self._deaths[rank] = code
        if all(code is not None for code in codes):
            return self._wiring_ended()
        if self._kill_at is None:
            if any(code not in (None, EXIT_FINISHED, EXIT_STOPPED) for code in codes):
                self.ask()
                self._kill_at = time.monotonic() + PEER_GRACE_S
            elif self._wiring is not None and self._wiring.gave_up():
                # MPICH's MPI_Abort returns: it relies on this kill.
                self._survivors = {rank for rank, code in enumerate(codes) if code is None}
                self.kill()
        elif time.monotonic() > self._kill_at:
            self.kill()
        return False

    def _wiring_ended(self) -> bool:
        """Whether MPI's launcher has ended after its ranks; there may be none."""
        if self._wiring is None:
            return True
        self._wiring.release()
        return self._wiring.ended()

    def ask(self) -> None:
        """Send SIGTERM to the ranks that live; their helpers get none."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all now, helpers included."""
        for rank, process in enumerate(self._processes):
            if rank not in self._deaths:
                _kill_group(process)

    def lost_nodes(self) -> list[str]:
        """None: this machine is here."""
        return []

    def exit_codes(self) -> dict[str, int]:
        """Exit codes by rank, in the order in which they ended; MPI's launcher speaks for those that it gave up."""
        codes = {f"rank {rank}": code for rank, code in self._deaths.items() if rank not in self._survivors}
        return codes if not self._survivors or self._wiring is None else {**codes, "mpiexec": self._wiring.code}

    def deaths(self) -> tuple[Death, ...]:
        """None: the exit codes tell."""
        return ()

    def last_words(self) -> str:
        """Last line in the log of the first rank that died without a record."""
        logs = [self._attempt.rank_log(rank) for rank in self._survivors]
        aborts = [line.strip() for log in logs for line in _tail(log) if _ABORT.search(line)]
        if aborts:
            return aborts[0]
        for rank, code in self._deaths.items():
            if code not in (EXIT_FINISHED, EXIT_STOPPED) and not self._attempt.rank_exit(rank).exists():
                return _last_line(self._attempt.rank_log(rank))
        return ""


class SrunRanks:
    """The ranks as tasks of one `srun`."""

    def __init__(self, run: RunDir, plan: LaunchPlan, attempt: AttemptDir, env: Mapping[str, str]) -> None:
        self._run = run
        self._plan = plan
        self._attempt = attempt
        self._env = rank_environment(plan, attempt, env)
        self._log = attempt.path / "srun.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.nodes = allocated_nodes(plan, env)
        self.world_size = world_size_of(plan, env)

    def command(self, binding: Sequence[str] = ()) -> list[str]:
        """The words that start the ranks; `binding`: options that bind or order them, which only their nodes can tell,
        in the place of the plan's own."""
        # Slurm reads % in a path as the start of a pattern.
        folder = str(self._attempt.path).replace("%", "%%")
        named = {word.partition("=")[0] for word in binding}
        kept = [word for word in self._plan.srun_options if word.partition("=")[0] not in named]
        return [
            "srun",
            f"--nodes={self.nodes}",
            f"--ntasks={self.world_size}",
            *kept,
            *binding,
            f"--output={folder}/rank-%5t.log",
            "--open-mode=append",
            *self._plan.rank_command,
            str(self._run.path),
        ]

    def start(self) -> None:
        """Start `srun` in a session of its own, so that Ctrl-C in a terminal reaches the keeper alone."""
        with open(self._log, "ab") as log:
            # A srun that is killed leaves its tasks behind; USR2 it hands on, so that they save and end.
            words = [*order_words(self._plan, self._env, self._attempt, self.nodes), *self._binding()]
            self._process = _spawn(self.command(words), self._env, signal.SIGUSR2, log)

    def _binding(self) -> list[str]:
        if self._plan.placement.get("bind") != "srun":
            return []
        from dthpc.placement.bind import srun_words

        return srun_words(self._plan.placement)

    def ended(self) -> bool:
        """Whether srun has ended, and with it all ranks."""
        return self._process is not None and self._process.poll() is not None

    def ask(self) -> None:
        """Ask by SIGUSR2, which srun hands on to the tasks; SIGTERM it would answer by killing them."""
        self._send(signal.SIGUSR2)

    def kill(self) -> None:
        """End the step now ("forcing job termination", says srun)."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._process is not None and not self.ended():
            self._process.send_signal(number)

    def lost_nodes(self) -> list[str]:
        """Nodes of which srun says that they failed."""
        return [match[1] for line in _tail(self._log) if (match := _NODE_FAILURE.search(line))]

    def exit_codes(self) -> dict[str, int]:
        """Exit code of srun."""
        code = None if self._process is None else self._process.poll()
        return {} if code is None else {"srun": code}

    def deaths(self) -> tuple[Death, ...]:
        """Ranks that were killed, by srun's words, up to where it ends the step itself."""
        return deaths_in_log(_tail(self._log))

    def last_words(self) -> str:
        """Last error that srun told."""
        lines = [line for line in _tail(self._log) if "error" in line.lower()]
        return lines[0].strip() if lines else _last_line(self._log)


def deaths_in_log(lines: Iterable[str]) -> tuple[Death, ...]:
    """Ranks of which srun's lines say that a signal ended them, in order, up to where srun ends the others itself."""
    deaths: list[Death] = []
    for line in lines:
        if _ENDS_STEP.search(line):
            break
        match = _DEATH.search(line)
        if match is not None:
            deaths += [Death(rank, _SIGNALS[match[2]]) for rank in _numbers(match[1])]
    return tuple(deaths)


def _numbers(text: str) -> list[int]:
    """Numbers of a text such as `0,2-3`."""
    spans = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def world_size_of(plan: LaunchPlan, env: Mapping[str, str]) -> int:
    """Number of ranks that a plan starts here.

    Raises:
        UserError: there is no allocation, or it is smaller than the plan.
    """
    return plan.tasks_per_node if plan.kind == "local" else allocated_nodes(plan, env) * plan.tasks_per_node


def allocated_nodes(plan: LaunchPlan, env: Mapping[str, str]) -> int:
    """Nodes of this attempt: those of the allocation, at most as many as the plan wants.

    Raises:
        UserError: there is no allocation, or it is smaller than the plan.
    """
    text = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")
    if text is None:
        raise UserError(
            "there is no Slurm allocation here",
            key="cluster.kind",
            value=plan.kind,
            instead="cluster.kind=slurm to ask for one by sbatch, or type the command inside `salloc`",
        )
    nodes = min(int(text), plan.max_nodes)
    if nodes < plan.nodes:
        raise UserError(
            f"the allocation has {nodes} nodes",
            key="cluster.nodes",
            value=plan.nodes,
            instead=f"cluster.nodes={nodes}, or a larger allocation",
        )
    return nodes


def make_ranks(run: RunDir, plan: LaunchPlan, attempt: AttemptDir, env: Mapping[str, str]) -> Ranks:
    """The processes that a plan wants, not yet started."""
    kind: Callable[[RunDir, LaunchPlan, AttemptDir, Mapping[str, str]], Ranks]
    kind = LocalRanks if plan.kind == "local" else SrunRanks
    return kind(run, plan, attempt, env)


def _spawn(
    command: list[str], env: dict[str, str], at_death: int, log: IO[bytes], descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    keeper = os.getpid()
    try:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=lambda: die_with_parent(at_death, parent=keeper),
        )
    except FileNotFoundError as error:
        raise UserError(
            f"the command can't be started: {error.strerror}", key=command[0], instead="check PATH, and cluster.setup"
        ) from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(path: Path, size: int = 8192) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in _tail(path) if line.strip()]
    return lines[-1] if lines else ""
