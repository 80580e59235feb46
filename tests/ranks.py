"""Real ranks for tests: a few processes, started once, that form a Gloo group of any size for each task."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class RankFailed(Exception):
    """A task raised on some rank; `errors` holds its exception's text for each rank, `None` where it ended well."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error))


class RankPool:
    """Processes that stand by for tasks; a task is a module-level function `(rank, *arguments) -> picklable`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="dthpc-ranks-")
        self._tasks = 0

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on ranks 0 … size-1 of a fresh Gloo group; returns their results in order."""
        while len(self._workers) < size:
            self._start()
        self._tasks += 1
        store = str(Path(self._folder.name) / f"store-{self._tasks}")
        for rank in range(size):
            self._workers[rank][1].send((rank, size, store, function, arguments))
        answers = [self._workers[rank][1].recv() for rank in range(size)]
        if any(error for _, error in answers):
            raise RankFailed([error for _, error in answers])
        return [result for result, _ in answers]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.join(timeout=20)
        self._folder.cleanup()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))


@functools.cache
def pool() -> RankPool:
    """The one pool of the test session."""
    started = RankPool()
    atexit.register(started.close)
    return started


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, size, store, function, arguments = connection.recv()
        except EOFError:
            return
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        try:
            answer = (function(rank, *arguments), None)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            dist.destroy_process_group()
        connection.send(answer)


def repository() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
