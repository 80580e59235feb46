"""Real ranks for the tests of this folder: processes forked from one that has imported torch, joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# `torch._dynamo` takes a second to import, and every optimizer does.
_PRELOAD = ["pytest", "numpy.random", "torch._dynamo", "torch.distributed.checkpoint"]
_PATIENCE = timedelta(seconds=90)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    exit_code: int
    """Of the process; minus the signal that killed it."""
    result: Any
    """What the function returned, or the exception it raised."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """Run `function(rank, *arguments)` on gloo ranks of their own; with `world_size` 0, in one process without gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as meeting:
        ranks = []
        for rank in range(max(world_size, 1)):
            here, there = context.Pipe(duplex=False)
            target = (rank, world_size, f"{meeting}/store", there, function, arguments)
            process = context.Process(target=_rank, args=target, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        results = [_receive(here) for _, here in ranks]
        ended = []
        for (process, _), result in zip(ranks, results, strict=True):
            process.join(_PATIENCE.total_seconds())
            assert process.exitcode is not None, "a rank hangs"
            ended.append(Ended(process.exitcode, result))
    return ended


def results(ended: list[Ended]) -> list[Any]:
    """What the ranks returned; raises the first exception of one of them."""
    for each in ended:
        if isinstance(each.result, BaseException):
            raise each.result
        assert each.exit_code == 0, each
    return [each.result for each in ended]


def _receive(here: Connection) -> Any:
    if not wait([here], _PATIENCE.total_seconds()):
        raise TimeoutError("a rank hangs")
    try:
        return here.recv()
    except EOFError:
        return None


def _rank(
    rank: int, world_size: int, store: str, there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_PATIENCE
            )
        there.send(function(rank, *arguments))
    except Exception as error:
        there.send(error)
    # Not a tidy exit: gloo's threads may wait for a peer that was killed.
    sys.stdout.flush()
    os._exit(0)


def kill_at(point: int, within: Path) -> None:
    """SIGKILL this process just before its `point`-th file operation below a folder, syncs included."""
    touched = 0

    def touch() -> None:
        nonlocal touched
        touched += 1
        if touched == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" or event.startswith("os."):
            paths = [str(each) for each in arguments if isinstance(each, str | os.PathLike)]
            if any(path.startswith(str(within)) for path in paths):
                touch()

    real = os.fsync

    def fsync(descriptor: int) -> None:
        touch()
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


def limit_file_size(size: int, kill: bool) -> None:
    """Let no file of this process grow beyond a size: the write is cut short and fails, or kills the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kill else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
