from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.jobs.collectives.room import COPIES, free_memory, largest_message


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMORY = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     800 kB\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (MEMORY, 800 * 1024),
        ({}, None),
        (
            {
                **MEMORY,
                "proc/self/cgroup": "0::/slurm/job_7\n",
                "sys/fs/cgroup/slurm/job_7/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_7/memory.current": "1000\n",
                "sys/fs/cgroup/slurm/memory.max": "5000\n",
                "sys/fs/cgroup/slurm/memory.current": "2000\n",
            },
            3000,
        ),
        (
            {
                **MEMORY,
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/slurm\n",
                "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "7000\n",
                "sys/fs/cgroup/memory/slurm/memory.usage_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
            },
            4000,
        ),
        ({**MEMORY, "proc/self/cgroup": "0::/../..\n"}, 800 * 1024),
    ],
)
def test_the_tightest_of_all_limits_counts(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    assert free_memory(write(tmp_path, files)) == free


def test_this_machine_has_memory() -> None:
    assert (free_memory() or 0) > 1 << 20


def test_ranks_of_a_node_share_it() -> None:
    assert largest_message(COPIES * 8000, 4, 0.5) == 1000
    assert largest_message(0, 4, 0.5) == 8
    assert largest_message(None, 4, 0.5) == 1 << 30
