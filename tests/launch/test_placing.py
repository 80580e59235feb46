"""What the checks say of threads and of the placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.launch.placing import exported_threads, placement_verdicts, threads_of
from dthpc.launch.planning import make_plan, wanted_placement
from dthpc.launch.request import read_request
from dthpc.launch.verdicts import Verdict
from dthpc.rundir import RunDir
from tests.launch.sites import make_config, make_site

TOPO = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV12\t0-7\t0\nGPU1\tNV12\t X \t8-15\t1\n"


def verdicts(config: Any, env: dict[str, str] | None = None) -> list[Verdict]:
    request = read_request(config)
    return list(placement_verdicts(config, request, wanted_placement(config, request, env or {}), env or {}))


@pytest.mark.parametrize(
    ("key", "given", "exported", "threads", "why"),
    [
        (None, None, None, 8, "one a core of cluster.cpus_per_task=8"),
        (None, None, "3", 3, "OMP_NUM_THREADS=3 of the environment"),
        (None, "4", "3", 4, "OMP_NUM_THREADS=4 of cluster.environment"),
        (5, "4", "3", 5, "placement.threads_per_rank=5"),
        (None, None, "6,2", 6, "OMP_NUM_THREADS=6 of the environment"),
        (None, None, "many", 8, "one a core of cluster.cpus_per_task=8"),
    ],
)
def test_what_was_exported_wins_over_cores_and_a_key_over_both(
    tmp_path: Path, key: int | None, given: str | None, exported: str | None, threads: int, why: str
) -> None:
    config = make_config(tmp_path, cpus_per_task=8, environment={} if given is None else {"OMP_NUM_THREADS": given})
    config.placement.threads_per_rank = key
    env = {} if exported is None else {"OMP_NUM_THREADS": exported}
    assert threads_of(config, read_request(config), env) == (threads, why)
    # The plan holds it, so that a restart from another shell finds the same.
    plan = make_plan(config, RunDir(tmp_path / "r"), make_site(), env)
    assert (plan.threads_per_rank, plan.placement["threads"]) == (threads, threads)


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "1 2", "100000000"])
def test_what_is_no_number_of_threads_is_none(text: str) -> None:
    assert exported_threads(text) is None


@pytest.mark.parametrize(
    ("exported", "status", "told"),
    [
        ("2", "warning", "which wins over its 8 cores; placement.threads_per_rank=8 uses all 8 cores"),
        ("8", "ok", "8 threads a rank: OMP_NUM_THREADS=8 of the environment"),
        ("16", "warning", "more than its 8 cores: they take turns"),
        ("many", "warning", "OMP_NUM_THREADS='many' is no number of threads and is passed over"),
    ],
)
def test_what_threads_cost_is_told(tmp_path: Path, exported: str, status: str, told: str) -> None:
    found = verdicts(make_config(tmp_path, cpus_per_task=8), {"OMP_NUM_THREADS": exported})[0]
    assert (found.check, found.status) == ("threads", status)
    assert told in found.note


def test_a_recorded_node_that_the_ranks_do_not_fit_is_an_error_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(TOPO)
    config = make_config(tmp_path, gpus_per_node=4, tasks_per_node=4)
    config.placement.topology = str(file)
    (found,) = [one for one in verdicts(config) if one.status == "error"]
    assert found.note.startswith("cluster.gpus_per_node=4: 2 GPUs")
    config.placement.topology = str(tmp_path / "absent")
    (found,) = [one for one in verdicts(config) if one.status == "error"]
    assert found.note.startswith(f"placement.topology={tmp_path}/absent: the file cannot be read")


def test_crowded_cores_of_a_recorded_node_are_told(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(TOPO)
    config = make_config(tmp_path, tasks_per_node=32)
    config.placement.topology = str(file)
    assert any("take turns" in one.note for one in verdicts(config) if one.status == "warning")


@pytest.mark.parametrize(
    ("kind", "bind", "told"),
    [
        ("local", "auto", "cores are not bound: other runs may use this machine"),
        ("local", "rank", "each rank binds itself before torch starts"),
        ("slurm", "auto", "the step's cores are the run's alone; nodes are read when the ranks start"),
        ("slurm", "none", "cores are not bound"),
    ],
)
def test_who_binds_is_told(tmp_path: Path, kind: str, bind: str, told: str) -> None:
    config = make_config(tmp_path, kind=kind)
    config.placement.bind = bind
    (found,) = [one for one in verdicts(config) if one.check == "placement"]
    assert (found.status, told in found.note) == ("ok", True)
