"""Runs with scripted ranks, kept by a real keeper process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dthpc.attempt.plan import LaunchPlan
from dthpc.rundir import RunDir, read_json

RANK = [sys.executable, "-m", "tests.attempt.scripted_rank"]
KEEPER = [sys.executable, "-m", "dthpc.attempt.keeper"]
REPOSITORY = Path(__file__).resolve().parents[2]


def make_run(path: Path, script: list[list[str]], **plan: Any) -> RunDir:
    """A run folder with a launch plan of as many local ranks as the script has."""
    run = RunDir(path)
    run.path.mkdir(parents=True)
    run.config.write_text("job: {}\n")
    (run.path / "script.json").write_text(json.dumps(script))
    settings: dict[str, Any] = {
        "kind": "local",
        "nodes": 1,
        "max_nodes": 1,
        "tasks_per_node": len(script[0]),
        "cpus_per_task": 1,
        "threads_per_rank": 1,
        "gpus_per_node": 0,
        "rank_command": RANK,
        "keeper_command": KEEPER,
        "requeue": "restart",
    }
    LaunchPlan(**{**settings, **plan}).write(run)
    return run


def start_keeper(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """A keeper as the executor would start it."""
    env = {**os.environ, **options.pop("env", {})}
    command = [*KEEPER, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def keep(run: RunDir) -> tuple[int, str]:
    """Exit code and output of a keeper that ends by itself."""
    process = start_keeper(run.path)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of a question, asked often."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


def wait_ready(run: RunDir, attempt: int, ranks: int) -> list[int]:
    """Process ids of an attempt's ranks, once all are at their work."""
    files = [run.attempt(attempt).path / f"ready-{rank}" for rank in range(ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def end_of(run: RunDir, attempt: int) -> dict[str, Any]:
    """The end that the keeper recorded."""
    end = read_json(run.attempt(attempt).end)
    assert isinstance(end, dict)
    return end


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
