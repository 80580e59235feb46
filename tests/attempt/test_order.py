"""Ranks switch by switch, on a real Slurm that knows a tree of switches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, missing_for_slurm

pytestmark = pytest.mark.slurm

SUBMIT = [sys.executable, "-m", "dthpc.submit", "+cluster=slurm", "cluster.nodes=4", "cluster.tasks_per_node=2"]


@pytest.fixture(scope="module")
def tree() -> Iterator[Any]:
    reason = missing_for_slurm()
    if reason is not None:
        pytest.skip(reason)
    from mini import Cluster

    switches = ["leaf1 Nodes=node[1,3]", "leaf2 Nodes=node[2,4]", "root Switches=leaf[1-2]"]
    name = f"tree{os.getpid()}"
    with Cluster(name, nodes=4, cpus=2, gpus=0, accounting=False, preempt="none", switches=switches) as cluster:
        yield cluster


def run_of(tree: Any, root: Path, name: str, *words: str) -> Path:
    """Submit a run that only tells where its ranks are, and wait for its end."""
    own = ["job._target_=tests.attempt.where.tell", f"run.root={root}", f"run.name={name}", "json=true", *words]
    done = tree.run([*SUBMIT, *own], cwd=REPOSITORY, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads(done.stdout)["runs"][0]["job_id"]
    state = tree.wait_job(job, "COMPLETED", "FAILED", seconds=240)
    folder = root / name
    assert state == "COMPLETED", "".join(path.read_text() for path in folder.rglob("*.log"))
    return folder


def hosts_of(folder: Path) -> list[str]:
    return [(folder / f"host-{rank}").read_text() for rank in range(8)]


def test_ranks_fill_the_nodes_of_one_switch_before_those_of_the_next(tree: Any, tmp_path: Path) -> None:
    folder = run_of(tree, tmp_path, "switches")
    assert hosts_of(folder) == [f"node{number} {local}" for number in (1, 3, 2, 4) for local in (0, 1)]


def test_what_the_user_says_of_the_distribution_wins(tree: Any, tmp_path: Path) -> None:
    folder = run_of(tree, tmp_path, "cyclic", "+cluster.srun.distribution=cyclic")
    assert [line.split()[0] for line in hosts_of(folder)] == ["node1", "node2", "node3", "node4"] * 2


def test_a_dry_run_tells_the_order(tree: Any) -> None:
    done = tree.run([*SUBMIT, "dry_run=true"], cwd=REPOSITORY, env=dict(os.environ))
    assert "ranks    numbered switch by switch" in done.stdout
    assert "2 leaf switches have up to 2 nodes each" in done.stdout
