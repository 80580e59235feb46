"""Checks against the machine and the site."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dthpc.launch.preflight import check_launch, judge_launch
from dthpc.launch.site import Site
from dthpc.launch.verdicts import Verdict
from tests.launch.sites import add_command, client_of, make_config, make_partition, make_shape, make_site


def judge(tmp_path: Path, site: Site | None = None, lead: int | None = None, **cluster: Any) -> list[Verdict]:
    config = make_config(tmp_path / "runs", **cluster)
    config.checkpoint.save_lead_s = lead
    return judge_launch(config, site or make_site(), client=client_of(tmp_path / "bin"))


def found(verdicts: list[Verdict], status: str) -> dict[str, str]:
    return {verdict.check: verdict.note for verdict in verdicts if verdict.status == status}


def test_a_sound_request_passes_and_says_what_was_looked_at(tmp_path: Path) -> None:
    verdicts = judge(tmp_path, nodes=2, tasks_per_node=2, cpus_per_task=2, gpus_per_node=2, memory="4G", nodelist="n1")
    assert not found(verdicts, "error")
    passed = found(verdicts, "ok")
    assert passed["request"] == "2 nodes, each with 2 tasks of 2 cores, 2 GPUs a node"
    assert {"partition", "time", "nodes", "node size", "hosts", "requeue", "preemption"} <= set(passed)


@pytest.mark.parametrize(
    ("cluster", "key", "told"),
    [
        ({"partition": "mian"}, "cluster.partition", "did you mean main"),
        ({"time": "1", "lead": 60}, "cluster.time", "not longer than the 60 s"),
        ({"partition": "grace", "time": "3:00:00"}, "cluster.time", "MaxTime=02:00:00"),
        ({"partition": "grace", "time": "UNLIMITED"}, "cluster.time", "MaxTime=02:00:00"),
        ({"nodes": 4}, "cluster.nodes", "at most 3 nodes"),
        (
            {"tasks_per_node": 3, "cpus_per_task": 3},
            "cluster.tasks_per_node",
            r"3 tasks of 3 cores need 9 CPUs.*have 8",
        ),
        ({"memory": "9G"}, "cluster.memory", "no nodes of partition main"),
        ({"memory_per_cpu": "5G", "cpus_per_task": 2}, "cluster.memory_per_cpu", "10240 MB"),
        ({"gpus_per_node": 3}, "cluster.gpus_per_node", "3 GPUs on each node"),
        ({"gpus_per_node": 1, "gpu_type": "h100"}, "cluster.gpus_per_node", "1 GPU of type h100"),
        ({"exclude": "n9"}, "cluster.exclude", "no such node"),
        ({"nodelist": "n[1", "nodes": 1}, "cluster.nodelist", "never closed"),
        ({"nodes": 0}, "cluster.nodes", "a run needs a node"),
        ({"nodes": "3-2"}, "cluster.nodes", "backwards"),
        ({"time": "soon"}, "cluster.time", "no time that sbatch reads"),
        ({"after": ["nobody"]}, "cluster.after", "no run of this name"),
        ({"sbatch": {"time": 5}}, "cluster.sbatch.time", r"comes from cluster\.time"),
        ({"container": {"image": "x"}}, "cluster.container.image", "would be ignored"),
    ],
)
def test_one_mistake_is_one_error(tmp_path: Path, cluster: dict[str, Any], key: str, told: str) -> None:
    errors = [verdict.error for verdict in judge(tmp_path, **cluster) if verdict.error is not None]
    assert [error.key for error in errors] == [key]
    with pytest.raises(type(errors[0]), match=told):
        raise errors[0]


def test_a_value_that_is_malformed_gets_no_further_verdict(tmp_path: Path) -> None:
    assert not {"time", "nodes"} & set(found(judge(tmp_path, time="soon", nodes=0), "ok"))


def test_all_mistakes_are_found_together(tmp_path: Path) -> None:
    config = make_config("/proc/nowhere", nodes=0, time="x", partition="y", sbatch={"nodes": 2}, after=["z"])
    errors = check_launch(config, make_site(), client=client_of(tmp_path))
    assert [error.key for error in errors] == [
        "cluster.nodes",
        "cluster.time",
        "cluster.sbatch.nodes",
        "cluster.after",
        "cluster.partition",
        "run.root",
    ]


def test_what_is_only_unwise_is_a_warning(tmp_path: Path) -> None:
    assert "as soon as they have begun" in found(judge(tmp_path, time="2", lead=90), "warning")["time"]
    closed = make_site(partitions=[make_partition("main", Default="YES", State="DOWN")])
    assert "main is DOWN" in found(judge(tmp_path, closed), "warning")["partition"]
    drained = make_site(shapes=[make_shape("main", usable=False, state="drained")])
    assert "3 drained" in found(judge(tmp_path, drained), "warning")["node size"]


def test_a_partition_of_unlike_nodes_has_enough_of_the_larger_kind(tmp_path: Path) -> None:
    site = make_site(shapes=[make_shape("main", count=1, cpus=64), make_shape("main", count=2, cpus=4)])
    assert not found(judge(tmp_path, site, nodes=1, tasks_per_node=8), "error")
    assert (
        "1 node of partition main can give that"
        in found(judge(tmp_path, site, nodes=2, tasks_per_node=8), "error")["node size"]
    )


def test_limits_of_a_partition(tmp_path: Path) -> None:
    site = make_site(partitions=[make_partition("main", Default="YES", MaxNodes=1, MinNodes=1, MaxCPUsPerNode=2)])
    assert "MaxNodes=1" in found(judge(tmp_path, site, nodes=2), "error")["nodes"]
    assert "its nodes have 2" in found(judge(tmp_path, site, tasks_per_node=4), "error")["node size"]
    wide = make_site(partitions=[make_partition("main", Default="YES", MinNodes=2)])
    assert "at least 2 nodes" in found(judge(tmp_path, wide), "error")["nodes"]


def test_options_that_sbatch_does_not_take(tmp_path: Path) -> None:
    add_command(tmp_path / "bin", "sbatch", 'case "$1" in --nice=1|--help) echo Usage: --nice;; *) exit 1;; esac')
    assert "known to sbatch and srun here: nice" in found(judge(tmp_path, sbatch={"nice": 1}), "ok")["options"]
    assert "did you mean" not in found(judge(tmp_path, sbatch={"nice": 1}), "ok")
    assert "cluster.sbatch.nicer=1" in found(judge(tmp_path, sbatch={"nicer": 1}), "error")["options"]


def test_an_allocation_is_needed_for_an_allocation_run(tmp_path: Path) -> None:
    for name in ("srun", "scontrol"):
        add_command(tmp_path / "bin", name, "exit 0")
    config, client = make_config(tmp_path, kind="allocation"), client_of(tmp_path / "bin")
    (error,) = check_launch(config, make_site(), env={}, client=client)
    assert "in no Slurm allocation" in error.message()
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert check_launch(config, make_site(), env=env, client=client) == []


def test_local_ranks_without_cores_of_their_own_cost_time(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    verdicts = judge_launch(make_config(tmp_path, kind="local", tasks_per_node=2 * cores))
    assert "about 2.0 times as long" in found(verdicts, "warning")["cores"]
    assert not found(verdicts, "error")
    assert (
        f"{cores} of {cores} cores"
        in found(judge_launch(make_config(tmp_path, kind="local", tasks_per_node=cores)), "ok")["cores"]
    )


@pytest.mark.parametrize(
    ("cluster", "status", "told"),
    [
        ({"nodes": 1}, "warning", "compares nodes, and this run has one"),
        ({"nodes": 2}, "ok", "of two nodes, one is refused only if it is slower by a factor of 3"),
        ({"nodes": 3}, "ok", "bad ones are left out and the job is queued again"),
    ],
)
def test_what_examining_nodes_before_training_can_do_is_told(
    tmp_path: Path, cluster: dict[str, Any], status: str, told: str
) -> None:
    config, client = make_config(tmp_path, **cluster), client_of(tmp_path / "bin")
    assert not [one for one in judge_launch(config, make_site(), client=client) if one.check == "preflight"]
    config.resilience.preflight = True
    (one,) = [one for one in judge_launch(config, make_site(), client=client) if one.check == "preflight"]
    assert (one.status, told in one.note) == (status, True)


@pytest.mark.parametrize(
    ("nodes", "exclude", "status", "told"),
    [
        (2, "n3", "ok", "2 nodes of main left without those of cluster.exclude"),
        (3, "n3", "error", "cluster.exclude=n3: partition main has 2 nodes besides, and the run needs 3"),
        (1, "n[1-3]", "error", "partition main has no nodes besides, and the run needs 1"),
        (1, "n9", "error", "cluster.exclude=n9: the site has no such node"),
    ],
)
def test_excluded_nodes_are_known_and_leave_enough(
    tmp_path: Path, nodes: int, exclude: str, status: str, told: str
) -> None:
    verdicts = judge(tmp_path, nodes=nodes, exclude=exclude)
    assert told in " ".join(one.note for one in verdicts if (one.check, one.status) == ("hosts", status))


def test_a_preflight_of_one_node_is_told_that_it_compares_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", nodes=1)
    config.job = {"_target_": "dthpc.jobs.preflight.job.run"}
    notes = found(judge_launch(config, make_site(), client=client_of(tmp_path / "bin")), "warning")
    assert notes["preflight"].startswith("job=preflight compares nodes, and this run has one")
    config.cluster.nodes = "1-2"
    notes = found(judge_launch(config, make_site(), client=client_of(tmp_path / "bin")), "warning")
    assert "preflight" not in notes
