"""Ranks that MPI's own launcher starts, each a `tests.comm.meeting`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.mpi_installations import python_of
from tests.ranks import repository


def start(folder: Path, family: str, size: int, **request: Any) -> list[dict[str, Any]]:
    """Let ranks begin by their `comm` group under the `mpiexec` of a family; what each found, in no order."""
    python = python_of(family)
    words = [str(python.parent / "mpiexec")]
    words += ["--allow-run-as-root", "--oversubscribe"] if family == "Open MPI" else ["-launcher", "fork"]
    for rank in range(size):
        asked = json.dumps({"rank": rank, "world_size": size, "host": "here", **request})
        words += [":"] if rank else []
        words += ["-n", "1", str(python), "-m", "tests.comm.meeting", str(folder), asked]
    done = subprocess.run(words, cwd=repository(), capture_output=True, text=True, timeout=180, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == size, done.stdout + done.stderr
    return found
