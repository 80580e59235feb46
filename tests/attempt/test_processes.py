from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.processes import SrunRanks, allocated_nodes, deaths_in_log, rank_environment, world_size_of
from dthpc.errors import UserError
from tests.attempt.runs import make_run, wait_for

ENV = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    run = make_run(
        tmp_path / "50% run",
        [["finish", "finish"]],
        kind="slurm",
        nodes=2,
        max_nodes=4,
        srun_options=["--ntasks-per-node=2", "--cpus-per-task=3", "--kill-on-bad-exit=1"],
        rank_command=["python", "-m", "rank"],
        environment={"A": "x,y=z", "DTHPC_ATTEMPT": "9"},
    )
    return LaunchPlan.read(run)


def srun(tmp_path: Path, plan: LaunchPlan, env: dict[str, str] = ENV) -> SrunRanks:
    from dthpc.rundir import RunDir

    run = RunDir(tmp_path / "50% run")
    run.attempt(4).path.mkdir(parents=True, exist_ok=True)
    return SrunRanks(run, plan, run.attempt(4), env)


def test_srun_starts_the_ranks_of_the_whole_allocation_each_with_its_log(tmp_path: Path, plan: LaunchPlan) -> None:
    ranks = srun(tmp_path, plan)
    folder = f"{tmp_path}/50%% run/attempts/4"  # Slurm reads a single % as the start of a pattern
    assert ranks.world_size == 6
    assert ranks.command() == [
        "srun",
        "--nodes=3",
        "--ntasks=6",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--kill-on-bad-exit=1",
        f"--output={folder}/rank-%5t.log",
        "--open-mode=append",
        "python",
        "-m",
        "rank",
        f"{tmp_path}/50% run",
    ]


def test_the_allocation_bounds_the_nodes(plan: LaunchPlan) -> None:
    assert allocated_nodes(plan, {**ENV, "SLURM_JOB_NUM_NODES": "9"}) == 4
    assert world_size_of(plan, ENV) == 6
    with pytest.raises(UserError, match=r"cluster\.nodes=2: the allocation has 1 nodes"):
        allocated_nodes(plan, {**ENV, "SLURM_JOB_NUM_NODES": "1"})
    with pytest.raises(UserError, match="no Slurm allocation"):
        allocated_nodes(plan, {})
    assert world_size_of(replace(plan, kind="local"), {}) == 2


def test_ranks_inherit_all_but_what_would_mislead_them(tmp_path: Path, plan: LaunchPlan) -> None:
    outer = {"HOME": "/h", "DTHPC_RANK": "3", "DTHPC_CHAIN": "job-1", "DTHPC_CACHE": "/c", "A": "old"}
    ranks = srun(tmp_path, plan)
    env = rank_environment(plan, ranks._attempt, outer)
    assert env == {"HOME": "/h", "DTHPC_CACHE": "/c", "A": "x,y=z", "DTHPC_ATTEMPT": "4", "PYTHONUNBUFFERED": "1"}


def test_what_srun_says_is_kept_and_its_first_error_told(tmp_path: Path, plan: LaunchPlan) -> None:
    command = tmp_path / "bin" / "srun"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho 'srun: error: n1: task 1: Out Of Memory'\necho 'srun: Terminating'\nexit 137\n")
    command.chmod(0o755)
    ranks = srun(tmp_path, plan, {**ENV, "PATH": f"{command.parent}:{os.environ['PATH']}"})
    ranks.start()
    wait_for(ranks.ended)
    assert ranks.exit_codes() == {"srun": 137}
    assert ranks.last_words() == "srun: error: n1: task 1: Out Of Memory"


def test_sruns_words_tell_who_was_killed_before_it_ended_the_others() -> None:
    lines = [
        "srun: error: n1: task 1: Exited with exit code 1",
        "srun: error: n1: task 0: Killed",
        "srun: error: n2: tasks 4,6-7: Segmentation fault (core dumped)",
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0",
        "srun: error: n1: task 2: Killed",
    ]
    died = [(death.rank, death.signal) for death in deaths_in_log(lines)]
    assert died == [(0, "SIGKILL"), (4, "SIGSEGV"), (6, "SIGSEGV"), (7, "SIGSEGV")]
    # As Slurm 22.05 wrote it when rank 0 was killed and rank 1 lost its connection.
    real = [
        "srun: error: node1: task 0: Killed",
        "srun: launch/slurm: _step_signal: Terminating StepId=33.0",
        "srun: error: node2: task 1: Exited with exit code 1",
        "srun: Force Terminated StepId=33.0",
    ]
    assert [death.rank for death in deaths_in_log(real)] == [0]
