"""Ranks switch by switch, on a real Slurm that knows a tree of switches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.order import BLOCKS, order_words
from dthpc.attempt.plan import LaunchPlan
from dthpc.rundir import AttemptDir
from tests.conftest import REPOSITORY, missing_for_slurm

pytestmark = pytest.mark.slurm

SUBMIT = [sys.executable, "-m", "dthpc.submit", "+cluster=slurm", "cluster.nodes=4"]


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


def test_ranks_fill_the_nodes_of_one_switch_before_those_of_the_next(tree: Any, tmp_path: Path) -> None:
    folder = run_of(tree, tmp_path, "switches")
    found = [(folder / f"host-{rank}").read_text() for rank in range(4)]
    assert found == [f"node{number} 0" for number in (1, 3, 2, 4)]


@pytest.mark.parametrize("changed", ["distribution", "by_switch", "few"])
def test_what_the_user_says_of_the_order_wins(tree: Any, tmp_path: Path, changed: str) -> None:
    plan = LaunchPlan(
        kind="slurm",
        nodes=4,
        max_nodes=4,
        tasks_per_node=2,
        cpus_per_task=1,
        threads_per_rank=1,
        gpus_per_node=0,
        rank_command=[],
        keeper_command=[],
        srun_options=["--distribution=cyclic" if changed == "distribution" else BLOCKS],
        placement={"by_switch": changed != "by_switch"},
    )
    attempt = AttemptDir(tmp_path / "0")
    attempt.path.mkdir()
    env = {**os.environ, "SLURM_JOB_NODELIST": "node[1-4]"}
    assert order_words(plan, env, attempt, 2 if changed == "few" else 4) == []
    assert list(attempt.path.iterdir()) == []


def test_a_dry_run_tells_the_order(tree: Any) -> None:
    done = tree.run([*SUBMIT, "dry_run=true"], cwd=REPOSITORY, env=dict(os.environ))
    assert "ranks    numbered switch by switch" in done.stdout
    assert "2 leaf switches have up to 2 nodes each" in done.stdout
