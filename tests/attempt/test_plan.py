from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.rundir import RunDir, write_json


def plan(**changes: Any) -> LaunchPlan:
    settings: dict[str, Any] = {
        "kind": "local",
        "nodes": 1,
        "max_nodes": 1,
        "tasks_per_node": 2,
        "cpus_per_task": 3,
        "threads_per_rank": 1,
        "gpus_per_node": 0,
        "rank_command": ["python", "-m", "dthpc.attempt.rank"],
        "keeper_command": ["python", "-m", "dthpc.attempt.keeper"],
    }
    return LaunchPlan(**{**settings, **changes})


def test_every_field_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = plan(
        kind="slurm",
        nodes=2,
        max_nodes=4,
        gpus_per_node=8,
        rank_command=["apptainer", "exec", "it's ours.sif", "python"],
        srun_options=["--mpi=pmix", "--comment=ein Täßchen"],
        environment={"A": "x,y", "EMPTY": ""},
        requeue="resubmit",
        batch_script="#!/bin/bash\necho 'two\tlines'\n",
        restart_on_failure=False,
        max_attempts_without_progress=5,
        max_attempts=9,
        restart_delay_s=1.5,
        grace_s=20.25,
        site={"sbatch": {"nodes": "2-4"}, "setup": [], "version": [22, 5, 8], "qos": None},
    )
    defaults = {item.name: item.default for item in fields(LaunchPlan)}
    kept = [name for name, default in defaults.items() if getattr(written, name) == default]
    assert kept == [], "a field left at its default proves nothing"
    written.write(RunDir(tmp_path))
    assert LaunchPlan.read(RunDir(tmp_path)) == written


def test_what_is_not_said_is_the_default_that_lies_in_the_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    plan().write(run)
    stored = json.loads(run.launch.read_text())
    assert stored.keys() == {item.name for item in fields(LaunchPlan)}
    assert (stored["requeue"], stored["max_attempts"], stored["environment"]) == ("never", None, {})


def test_plans_share_no_default(tmp_path: Path) -> None:
    first, second = plan(), plan()
    first.environment["A"] = "1"
    first.srun_options.append("--quiet")
    first.site["setup"] = []
    assert (second.environment, second.srun_options, second.site) == ({}, [], {})


def test_a_later_plan_takes_the_place_of_the_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new" / "run")
    plan(tasks_per_node=2).write(run)
    plan(tasks_per_node=8).write(run)
    assert LaunchPlan.read(run).tasks_per_node == 8
    assert [path.name for path in run.path.iterdir()] == ["launch.json"]


@pytest.mark.parametrize("text", [None, "", '{"kind": "loc', "[]", "null", "\x80"])
def test_a_folder_without_a_whole_plan_is_no_run(tmp_path: Path, text: str | None) -> None:
    run = RunDir(tmp_path / "thesis")
    run.path.mkdir()
    if text is not None:
        run.launch.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="holds no launch plan") as caught:
        LaunchPlan.read(run)
    assert (caught.value.key, caught.value.value) == ("run", run.path)


def test_a_folder_that_is_absent_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run=.*/absent: the folder holds no launch plan"):
        LaunchPlan.read(RunDir(tmp_path / "absent"))


def test_reading_it_needs_neither_hydra_nor_torch() -> None:
    code = "import sys, dthpc.attempt.plan; print([m for m in ('hydra', 'omegaconf', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_plan_of_an_unknown_form_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.launch, {"kind": "local", "newer": 1})
    with pytest.raises(UserError, match=r"unknown form.*newer.*submit the run again"):
        LaunchPlan.read(run)
