"""What an earlier start of the same job step left in shared memory, where MPICH would trip over it.

MPICH names the memory that ranks of a node share after the step: `mpich_shm_<hash of "JOB.STEP">_<number>` in /dev/shm
(seen with MPICH 5.0.2). It unlinks it when MPI ends in order. A requeued job has the same id, and its ranks are the
same step again: what the killed ones left has their sizes, and MPI_Init fails ("MPIDI_POSIX_comm_bootstrap: Out of
memory").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_leftovers(env: Mapping[str, str], folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what earlier starts of this process's step left on this node.

    Whatever is older than the process that started this one (`slurmstepd`) is of an earlier start: ranks of this one,
    which may already be in MPI_Init, are younger.

    Args:
        env: the environment of a rank; without `PMI_JOBID` (`srun --mpi=pmi2`), nothing is done.
        folder: where shared memory lies.

    Returns:
        What was removed.
    """
    step = env.get("PMI_JOBID")
    if not step:
        return []
    started = _start_of(os.getppid())
    removed = []
    for path in sorted(folder.glob(f"mpich_shm_{step_hash(step):x}_*")):
        # Another rank may be quicker, and another user's are not ours.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < started:
                path.unlink()
                removed.append(path)
    return removed


def step_hash(step: str) -> int:
    """MPICH's hash of a step's name: 32 bits of FNV-1a (Fowler, Noll and Vo)."""
    value = 2166136261
    for byte in step.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _start_of(pid: int) -> float:
    """When a process was started, in Unix seconds; 0 where the kernel does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, StopIteration):
        return 0.0
    return float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
