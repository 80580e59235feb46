"""A node with a bad link on a real Slurm: a preflight finds it, and a training job goes on without it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dthpc.monitor.events import read_events
from dthpc.rundir import read_json
from tests.conftest import missing_for_slurm
from tests.integration.trial import REPOSITORY, STEPS, Trial, write_text

pytestmark = pytest.mark.slurm

BAD = "node2"
# All nodes share this machine's cores and disk, so that only the network, which is shaped by the kernel, may count.
LOOSE = {"compute_s": 0.2, "memory_s": 0.1, "memory_mb": 4, "network_mb": 1, "files_mb": 1, "files": 3}
LOOSE |= {
    # Each takes the bad link half a second and more.
    "network_repeats": 2,
    "network_tolerance": 0.95,
    "outlier_z": 0.5,
    "compute_tolerance": 0.99,
    "memory_tolerance": 0.99,
    "files_tolerance": 0.999,
}


def keys(group: str) -> list[str]:
    return [f"{group}.{name}={value}" for name, value in LOOSE.items()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    reason = missing_for_slurm()
    if reason is not None:
        pytest.skip(reason)
    from mini import Cluster

    name = f"pre{os.getpid()}"
    with Cluster(name, nodes=4, cpus=8, gpus=0, accounting=False, preempt="none") as running:
        running.limit(BAD, "20mbit")
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    write_text(folder / "text")
    return folder


def trial(root: Path, name: str, cluster: Any, nodes: int, *words: str) -> Trial:
    where = (f"cluster.nodes={nodes}", "cluster.time=0:10:00", "resilience.preflight=true", "train.global_batch=12")
    return Trial(root, name, *where, *keys("resilience.checks"), *words, cluster=cluster)


@pytest.fixture(scope="module")
def examined(cluster: Any, root: Path) -> Trial:
    """A preflight of all four nodes."""
    words = ("job=preflight", "cluster.nodes=4", "cluster.time=0:10:00", *keys("job"))
    return Trial(root, "examined", *words, cluster=cluster).submit().done()


def test_the_node_with_the_bad_link_is_named(examined: Trial) -> None:
    told = read_json(examined.run.preflight)
    assert (told["bad"], told["exclude"]) == ([BAD], BAD)
    assert [node["node"] for node in told["nodes"]][-1] == BAD
    assert told["nodes"][-1]["why"][0].startswith("pair GB/s: ")
    events, _ = read_events(examined.run.events)
    (incident,) = [event for event in events if event["kind"] == "incident"]
    assert (incident["what"], incident["node"]) == ("bad node", BAD)
    assert f"cluster.exclude={BAD}" in examined.run.attempt(0).rank_log(0).read_text()


def door(cluster: Any, root: Path, *words: str) -> Any:
    command = [
        sys.executable,
        "-m",
        "dthpc.submit",
        "+cluster=slurm",
        f"run.root={root / 'runs'}",
        "dry_run=true",
        *words,
    ]
    return cluster.run(command, cwd=REPOSITORY, env=dict(os.environ))


def test_the_next_submission_leaves_it_out(examined: Trial, cluster: Any, root: Path) -> None:
    done = door(cluster, root, "cluster.exclude='preflight:examined,node4'", "cluster.nodes=2")
    assert "#SBATCH --exclude='node[4,2]'" in done.stdout
    assert "2 nodes of main left without those of cluster.exclude" in done.stdout


def test_excluding_too_many_and_strangers_is_refused_on_the_login_node(
    examined: Trial, cluster: Any, root: Path
) -> None:
    done = door(cluster, root, "cluster.exclude='preflight:last,nood4'", "cluster.nodes=4", "json=true")
    assert done.returncode == 2
    told = [check["note"] for check in json.loads(done.stdout)["runs"][0]["checks"] if check["status"] == "error"]
    assert any("cluster.exclude=nood4: the site has no such node. Instead: did you mean node4" in note for note in told)
    assert any("partition main has 3 nodes besides, and the run needs 4" in note for note in told)


@pytest.fixture(scope="module")
def trained(cluster: Any, root: Path) -> dict[str, Trial]:
    """Training jobs that are given the bad node first: one is requeued, one submitted anew, one needs all nodes."""
    runs = {
        "requeued": trial(root, "requeued", cluster, 3, "cluster.cpus_per_task=2"),
        "resubmitted": trial(root, "resubmitted", cluster, 3, "cluster.requeue=resubmit"),
        "stuck": trial(root, "stuck", cluster, 4),
    }

    def finish(name: str) -> None:
        run = runs[name].submit()
        run.end(0)
        if name == "requeued":
            run.release().done()
        elif name == "resubmitted":
            run.done("FAILED")
            run.job = str(run.continuation())
            run.done()
        else:
            run.done("FAILED")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(finish, runs))
    return runs


@pytest.mark.parametrize(("name", "decision"), [("requeued", "requeue"), ("resubmitted", "resubmit")])
def test_a_training_job_goes_on_without_the_bad_node(trained: dict[str, Trial], name: str, decision: str) -> None:
    run = trained[name]
    assert run.ends() == [("bad_nodes", decision), ("finished", "finish")]
    assert run.start(0)["nodes"] == ["node1", "node2", "node3"]
    assert run.start(1)["nodes"] == ["node1", "node3", "node4"]
    assert max(run.losses()) == STEPS
    assert (read_json(run.run.attempt(0).end) or {})["bad_nodes"].keys() == {BAD}


def test_a_job_that_needs_all_nodes_stops_and_says_why(trained: dict[str, Trial]) -> None:
    run = trained["stuck"]
    assert run.ends() == [("bad_nodes", "stop")]
    reason = (read_json(run.run.attempt(0).end) or {})["reason"]
    assert reason.startswith(f"preflight refuses {BAD} (pair GB/s: ")
    assert reason.endswith("without all that were refused, partition main has 3 nodes, and the run needs 4")
