"""Real ranks for tests: a few processes, started once, that form a Gloo group of any size for each task."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import multiprocessing
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE_S = 5.0
"""Once one rank has failed, how long the others may take to end; they often wait for it in a collective."""

COLLECTIVE_S = 60.0
"""How long a rank waits for others in a collective."""

MEETINGS = itertools.count()
"""Numbers of the tasks of all pools, which meet in one store."""


class RankFailed(Exception):
    """A task raised on some rank; `errors` holds its exception's text for each rank, `None` where it ended well."""

    def __init__(self, errors: list[str | None], order: list[int]) -> None:
        """Take the errors, and the ranks in the order in which they answered: the first one is told first."""
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {errors[rank]}" for rank in order if errors[rank]))


class Pool(ABC):
    """Processes that stand by for tasks; a task is a module-level function `(rank, *arguments) -> picklable`."""

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on ranks 0 … size-1 of a fresh group; returns their results in order.

        Raises:
            RankFailed: it raised on some rank. Ranks that then do not end within `PATIENCE_S` are replaced.
        """
        connections = self._stand_by(size)
        meeting = f"task-{next(MEETINGS)}"
        for rank, connection in enumerate(connections):
            self._send(connection, (rank, size, meeting, function, arguments))
        answers = self._collect(connections)
        if any(error for _, error in answers.values()):
            raise RankFailed([answers[rank][1] for rank in range(size)], list(answers))
        return [answers[rank][0] for rank in range(size)]

    @abstractmethod
    def _stand_by(self, size: int) -> list[Connection]:
        """Connections to ranks 0 … size-1, which are started where there are too few."""

    @abstractmethod
    def _lose(self, rank: int, why: str) -> str:
        """Take leave of a rank that will not answer; returns what to say of it."""

    @abstractmethod
    def _send(self, connection: Connection, message: Any) -> None:
        """Send an object."""

    @abstractmethod
    def _receive(self, connection: Connection) -> Any:
        """Receive one."""

    def _collect(self, connections: list[Connection]) -> dict[int, tuple[Any, str | None]]:
        """The answers of all ranks, in the order in which they came."""
        waiting = {connection: rank for rank, connection in enumerate(connections)}
        answers: dict[int, tuple[Any, str | None]] = {}
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), left)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = self._receive(connection)
                except (EOFError, ConnectionResetError):
                    answers[rank] = (None, self._lose(rank, "its process died"))
                if answers[rank][1] and deadline is None:
                    deadline = time.monotonic() + PATIENCE_S
            if not ready:
                why = f"did not end within {PATIENCE_S:g} s of another rank's error"
                answers.update({rank: (None, self._lose(rank, why)) for rank in waiting.values()})
                waiting.clear()
        return answers


class RankPool(Pool):
    """Ranks that talk by Gloo, each of which can be replaced by itself."""

    def __init__(self) -> None:
        # The ranks are forked from a process that has only imported: importing torch eight times takes half a minute.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "hydra.utils", "dthpc.jobs.train"])
        self._workers: list[tuple[Any, Connection]] = []

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.join(timeout=20)

    def _stand_by(self, size: int) -> list[Connection]:
        while len(self._workers) < size:
            self._workers.append(self._start())
        return [connection for _, connection in self._workers[:size]]

    def _send(self, connection: Connection, message: Any) -> None:
        connection.send(message)

    def _receive(self, connection: Connection) -> Any:
        return connection.recv()

    def _lose(self, rank: int, why: str) -> str:
        """Put a fresh process in a rank's place."""
        process, connection = self._workers[rank]
        process.kill()
        process.join()
        connection.close()
        self._workers[rank] = self._start()
        return f"{why} (exit code {process.exitcode})"

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, meeting_place().port), daemon=True)
        process.start()
        theirs.close()
        return process, ours


@functools.cache
def pool() -> RankPool:
    """The one pool of the test session."""
    started = RankPool()
    atexit.register(started.close)
    return started


@functools.cache
def meeting_place() -> TCPStore:
    """The store through which the ranks of this session meet: those that wait for a file look for it only now and then,
    at each group anew."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def leave_groups() -> None:
    """Destroy all process groups of this process, without a wait for their connections to be closed."""
    import torch.distributed as dist

    groups = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that could not start keeps its number, and then no later one would have the same on all ranks.
    dist.distributed_c10d._world.group_count = 0
    # Each group has threads that wake up a hundred times a second, until the last reference to it is gone.
    while gc.collect():
        pass
    # Gloo closes one connection after another, each when one of these threads has woken up.
    threading.Thread(target=groups.clear).start()


def _serve(connection: Connection, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()
    while True:
        try:
            rank, size, meeting, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(meeting, store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
            # A task that sends nothing could end, and its group with it, while another rank still connects.
            dist.barrier()
            answer = (function(rank, *arguments), None)
        except Exception as error:
            # Told before the group ends, so that this comes before the errors of ranks that then lose their peer.
            connection.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            answer = None
        finally:
            leave_groups()
        if answer is not None:
            connection.send(answer)


def repository() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
