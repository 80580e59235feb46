"""The collectives job by the real command: here, and over a real Slurm's network with one slow link."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from dthpc.rundir import RunDir, read_json

REPOSITORY = Path(__file__).resolve().parents[2]


def command(run: RunDir, *words: str) -> list[str]:
    place = [f"run.root={run.path.parent}", f"run.name={run.name}"]
    return [sys.executable, "-m", "dthpc.submit", "job=collectives", "follow=true", *place, *words]


def found(run: RunDir) -> dict[str, Any]:
    stored = read_json(run.collectives)
    assert isinstance(stored, dict)
    return stored


def test_a_local_run_measures_four_libraries_and_leaves_table_json_and_pictures(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "here")
    words = ["job.sizes=8-64K*32", "job.iterations=3", "job.pair_size=64K", "comm.backend=mpi"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(run, *words), cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = found(run)
    assert {line["backend"] for line in told["lines"]} == {"gloo", "mpi", "raw_gloo", "raw_mpi"}
    assert len({line["operation"] for line in told["lines"]}) == 12
    assert {line["wrong"] for line in told["lines"]} == {0}
    assert {line["size"] for line in told["lines"] if line["operation"] == "all_reduce"} == {8, 256, 8192, 65536}
    assert {fit["operation"] for fit in told["fits"]} >= {"all_reduce", "ping_pong"}
    assert [len(matrix["labels"]) for matrix in told["pairs"]] == [2]
    assert any("ranks compute on CPUs" in note for note in told["notes"])
    for part in ("best busbw", "all_to_all", "bisection", "result", "finished", "collectives.json"):
        assert part in done.stdout
    assert "algbw" in (run.path / "collectives.txt").read_text()
    pictures = sorted(run.path.glob("*.svg"))
    assert len(pictures) == 2
    for picture in pictures:
        assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.slurm
def test_a_node_with_a_slow_link_is_named(minicluster: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "there")
    words = ["+cluster=slurm", "cluster.nodes=3", "job.sizes=[8,64K]", "job.iterations=2", "job.pair_size=1M"]
    # What the machine does besides must not look like a slow link: only what is slow by a factor of three counts.
    words += ["job.operations=[all_reduce,all_gather,ping_pong]", "job.slow=0.3", "resilience.restart_on_failure=false"]
    minicluster.limit("node3", "50mbit")
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = minicluster.run(command(run, *words), cwd=REPOSITORY, env=environment)
    finally:
        minicluster.limit("node3", None)
    assert done.returncode == 0, done.stdout + done.stderr
    told = found(run)
    assert told["hosts"] == ["node1", "node2", "node3"]
    assert {line["wrong"] for line in told["lines"]} == {0}
    assert {line["nodes"] for line in told["lines"]} == {3}
    assert told["result"] == "slow"
    assert [(each["kind"], each["where"]) for each in told["findings"]] == [("node", "node3")]
    assert "node3 is slow to and from everybody" in done.stdout
    assert 'stroke="#d40000"' in (run.path / "pairs-nodes.svg").read_text()
