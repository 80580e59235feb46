"""MPI's launcher as the keeper uses it: for the wiring of the ranks, and for nothing else.

`mpiexec` knows how the processes of an MPI find each other, and little else that a keeper needs: it reports one exit
code for all ranks, kills them as it sees fit, and leaves some behind when it is killed itself. So it starts agents
(`mpi_agent.py`), which hand the keeper all that it gave them: variables, and an open connection. With these the keeper
starts the ranks itself, and everything that holds for its children holds for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dthpc.attempt import mpi_agent
from dthpc.errors import UserError
from dthpc.resilience.stop import die_with_parent

START_TIMEOUT_S = 60.0
"""Seconds for the launcher to start its agents; on one machine, it takes a fraction of one."""

END_TIMEOUT_S = 5.0
"""Seconds for the launcher to end after its agents."""

GIVE_UP_S = 0.5
"""Seconds in which the end of a rank shows, after the launcher has noticed it."""

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Where launchers tell a process its rank: MPICH and its kin, Open MPI, and any that speaks PMIx."""

_OUTER_MPI = ("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "MPI_LOCAL")
"""Beginnings of variables of an outer MPI: with them, a rank or the launcher would take itself for one of its ranks.
What users set for the libraries (`PMIX_MCA_…`, `HYDRA_…`) begins otherwise or stays."""


@dataclass(frozen=True)
class Wires:
    """What one rank gets of the launcher."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables."""

    descriptors: tuple[int, ...] = ()
    """Open connections that it inherits, under the numbers that its variables tell."""


class MpiWiring:
    """One `mpiexec` with an agent for each rank."""

    def __init__(self, command: list[str], world_size: int, env: Mapping[str, str], log: Path) -> None:
        """Prepare, without starting anything.

        Args:
            command: words that start a number of processes, which follows them.
            world_size: number of ranks.
            env: the environment of the ranks, without what the launcher adds.
            log: file for what the launcher says.
        """
        self.log = log
        self._command = command
        self._world_size = world_size
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._agents: dict[int, socket.socket] = {}
        self._released_at: float | None = None
        self._gave_up_at: float | None = None

    def start(self) -> list[Wires]:
        """Start the launcher, and wait for its agents.

        Returns:
            The wires of each rank. `close_descriptors` must be called when the ranks have them.

        Raises:
            UserError: the launcher can't be started, or it fails, or does not start all agents in time.
        """
        with tempfile.TemporaryDirectory(prefix="dthpc-mpi-") as folder, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")
            door.listen(self._world_size)
            self._spawn(f"{folder}/door")
            try:
                return self._receive(door)
            except BaseException:
                self.kill()
                raise

    def _spawn(self, door: str) -> None:
        agent = [sys.executable, "-I", "-S", mpi_agent.__file__, door]
        command = [*self._command, str(self._world_size), *agent]
        keeper = os.getpid()
        try:
            with open(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env=launcher_environment(self._env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent=keeper),
                )
        except OSError as error:
            raise self._failed(f"{command[0]} can't be started: {error.strerror}") from error

    def _receive(self, door: socket.socket) -> list[Wires]:
        """The wires of all ranks, whose agents come in any order."""
        assert self._process is not None
        found: dict[int, Wires] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(found) < self._world_size:
            if select.select([door], [], [], 0.05)[0]:
                agent, _ = door.accept()
                rank, wires = self._hear(agent)
                self._agents[rank], found[rank] = agent, wires
            elif self._process.poll() is not None:
                raise self._failed(f"mpiexec ended with exit code {self._process.returncode}: {self.last_words()}")
            elif time.monotonic() > deadline:
                raise self._failed(f"mpiexec started {len(found)} of {self._world_size} processes in time")
        return [found[rank] for rank in range(self._world_size)]

    def _hear(self, agent: socket.socket) -> tuple[int, Wires]:
        agent.settimeout(START_TIMEOUT_S)
        head, descriptors, _, _ = socket.recv_fds(agent, 8, len(mpi_agent.CONNECTIONS))
        told: dict[str, Any] = json.loads(_read(agent, int.from_bytes(head, "big")))
        given: dict[str, str] = told["environment"]
        rank = next((int(given[name]) for name in RANK_VARIABLES if name in given), None)
        if rank is None or not rank < self._world_size or rank in self._agents:
            raise self._failed(f"mpiexec told a process no rank of its own among {self._world_size}")
        before = launcher_environment(self._env)
        new = {name: value for name, value in given.items() if before.get(name) != value and name not in _OF_THE_AGENT}
        new.update({name: str(number) for name, number in zip(told["handed"], descriptors, strict=True)})
        return rank, Wires(new, tuple(descriptors))

    def _failed(self, why: str) -> UserError:
        return UserError(
            why,
            key="comm.backend",
            value="mpi",
            instead=f"comm.backend=gloo, or mend the launcher: `{' '.join(self._command)} 2 hostname` ({self.log})",
        )

    # --- while the ranks live, and after ----------------------------------------------------------------------------

    def gave_up(self) -> bool:
        """Whether the launcher has ended an agent whose rank was not released: it has given the whole job up.

        It does so when a rank calls MPI_Abort, or loses its connection to the launcher. Where that is because the rank
        died, its end is seen before this tells, and speaks for itself.
        """
        if self._released_at is not None or not self._agents:
            return False
        if self._gave_up_at is None:
            if select.select(list(self._agents.values()), [], [], 0)[0]:
                self._gave_up_at = time.monotonic()
            return False
        return time.monotonic() - self._gave_up_at > GIVE_UP_S

    @property
    def code(self) -> int:
        """Exit code of the launcher that has ended; that of MPI_Abort, where a rank called it."""
        code = None if self._process is None else self._process.poll()
        return 0 if code is None else code

    def release(self) -> None:
        """Let the agents end, since their ranks have; the launcher ends with them."""
        if self._released_at is None:
            self._released_at = time.monotonic()
            for agent in self._agents.values():
                agent.close()

    def ended(self) -> bool:
        """Whether the launcher has ended after its release; one that takes too long is killed."""
        if self._process is None or self._process.poll() is not None:
            return True
        if self._released_at is not None and time.monotonic() - self._released_at > END_TIMEOUT_S:
            self.kill()
        return False

    def kill(self) -> None:
        """End the launcher and its agents now."""
        self.release()
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """The last line that the launcher said."""
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        except OSError:
            return ""
        return next((line for line in reversed(lines) if re.search(r"\w", line)), "it said nothing")


_OF_THE_AGENT = ("PWD", "OLDPWD", "SHLVL", "_")
"""Variables that a shell in between may set, and which mean nothing to a rank."""


def without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what an outer MPI or Slurm told the process that has it: of Slurm, `mpiexec` would ask
    that it starts the agents."""
    return {name: value for name, value in without_outer_mpi(env).items() if not name.startswith("SLURM_")}


def without_outer_mpi(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what an outer MPI told the process that has it."""
    return {n: value for n, value in env.items() if not n.startswith(_OUTER_MPI) or n.startswith("PMIX_MCA_")}


def launcher_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: that of the ranks, but nothing of an outer MPI or Slurm.

    Open MPI refuses to run as root unless it is told twice; in a container, root is often the only user.
    """
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {**without_outer(env), **root}


def close_descriptors(wires: list[Wires]) -> None:
    """Close this process's copies of connections that were handed on."""
    for each in wires:
        for number in each.descriptors:
            os.close(number)


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise EOFError("an agent ended while it spoke")
        content += part
    return bytes(content)
