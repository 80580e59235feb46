"""From configuration to launch plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserErrors
from dthpc.launch.planning import make_plan, rank_table
from dthpc.rundir import RunDir
from tests.launch.sites import make_config, make_site


def test_a_local_plan_needs_no_site(tmp_path: Path) -> None:
    config = make_config(kind="local", tasks_per_node=2)
    config.placement.threads_per_rank = 3
    run = RunDir(tmp_path / "r")
    plan = make_plan(config, run)
    assert (plan.kind, plan.nodes, plan.tasks_per_node, plan.threads_per_rank) == ("local", 1, 2, 3)
    assert (plan.rank_command, plan.srun_options, plan.batch_script) == (
        [sys.executable, "-u", "-m", "dthpc.attempt.rank"],
        [],
        None,
    )
    assert plan.requeue == "restart"
    assert not run.path.exists(), "planning writes nothing"


def test_a_slurm_plan_survives_its_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    config = make_config(
        tmp_path, nodes="2-3", cpus_per_task=4, partition="grace", environment={"A": "x,y"}, python="/py"
    )
    plan = make_plan(config, run, make_site(), {})
    assert (plan.nodes, plan.max_nodes, plan.threads_per_rank, plan.grace_s, plan.requeue) == (2, 3, 4, 20, "requeue")
    assert plan.environment == {"A": "x,y"}
    assert plan.keeper_command == ["/py", "-u", "-m", "dthpc.attempt.keeper"]
    assert plan.site["save_lead_s"] == 300
    plan.write(run)
    assert LaunchPlan.read(run) == plan


def test_an_allocation_plan_takes_its_nodes_from_the_environment(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    plan = make_plan(make_config(kind="allocation", nodes="1-2"), RunDir(tmp_path / "r"), make_site(), env)
    assert (plan.nodes, plan.max_nodes, plan.requeue, plan.batch_script) == (2, 2, "restart", None)


def test_a_malformed_request_is_not_planned(tmp_path: Path) -> None:
    with pytest.raises(UserErrors):
        make_plan(make_config(nodes=0, time="x"), RunDir(tmp_path / "r"), make_site())


@pytest.mark.parametrize(
    ("tasks", "gpus", "shares"),
    [
        (2, 0, [[], []]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (2, 3, [[0], [1, 2]]),
    ],
)
def test_the_rank_table_fills_node_after_node(tmp_path: Path, tasks: int, gpus: int, shares: list[list[int]]) -> None:
    config = make_config(nodes=2, tasks_per_node=tasks, gpus_per_node=gpus)
    rows = rank_table(make_plan(config, RunDir(tmp_path / "r"), make_site()))
    assert [row.rank for row in rows] == list(range(2 * tasks))
    assert [(row.node, row.local_rank) for row in rows] == [(node, local) for node in (0, 1) for local in range(tasks)]
    assert [row.gpus for row in rows] == shares * 2
