"""Submissions to a real Slurm: every option arrives, refusals name the key, and nothing of an outer job leaks in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.launch.planning import make_plan
from dthpc.launch.preflight import check_launch
from dthpc.launch.request import read_request
from dthpc.launch.site import Site, derive, probe
from dthpc.launch.slurm_executor import SlurmExecutor, SlurmJob
from dthpc.rundir import RunDir
from dthpc.slurm.client import SlurmClient
from tests.launch.sites import make_config

pytestmark = pytest.mark.slurm


class Desk:
    """A submitting user's place: the site, a folder for runs, and what was submitted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.client = SlurmClient()
        self.site: Site = probe(self.client)
        self.jobs: list[SlurmJob] = []

    def plan(self, name: str = "r", **cluster: Any) -> tuple[RunDir, LaunchPlan]:
        run = RunDir(self.root / name)
        plan = make_plan(make_config(self.root, **cluster), run, self.site)
        plan.write(run)
        return run, plan

    def launch(self, *plans: tuple[RunDir, LaunchPlan]) -> list[SlurmJob]:
        found = SlurmExecutor(self.site).launch(plans)
        self.jobs += found
        return found

    def held(self, name: str = "r", **cluster: Any) -> SlurmJob:
        """Submit a run that Slurm holds, so that it can be looked at."""
        sbatch = {"hold": True, **cluster.pop("sbatch", {})}
        return self.launch(self.plan(name, sbatch=sbatch, **cluster))[0]

    def fields(self, job: SlurmJob) -> dict[str, str]:
        record = self.client.job(job.job_id)
        assert record is not None
        return record.fields

    def queue(self) -> list[str]:
        return self.client.ask(["squeue", "--noheader", "--array", "--format=%i"]).split()


@pytest.fixture
def desk(minicluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    environment, _ = minicluster.env()
    monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
    place = Desk(tmp_path)
    yield place
    for job_id in {job.job_id.split("_")[0] for job in place.jobs}:
        place.client.cancel(job_id)


def test_every_option_arrives(desk: Desk) -> None:
    other = desk.held("other")
    job = desk.held(
        nodes="2-3", tasks_per_node=2, cpus_per_task=3, gpus_per_node=2, partition="grace,main", exclude="node1",
        time="1-2:30", memory="4G", comment="it's 'quoted', 50% done # not a comment", mail_user="me@site.example",
        mail_type="END,FAIL", after=[other.job_id], exclusive=True, requeue="requeue",
        sbatch={"nice": 7, "begin": "now+1hour", "switches": 1, "contiguous": True},
    )  # fmt: skip
    fields = desk.fields(job)
    expected = {
        "JobName": "r", "NumNodes": "2-3", "CPUs/Task": "3", "Partition": "grace,main", "ExcNodeList": "node1",
        "TimeLimit": "1-02:30:00", "MinMemoryNode": "4G", "Comment": "it's 'quoted', 50% done # not a comment",
        "MailUser": "me@site.example", "MailType": "END,FAIL", "Requeue": "1", "Nice": "7", "Contiguous": "1",
        "OverSubscribe": "NO", "JobState": "PENDING", "StdOut": f"{desk.root}/r/submissions/{job.job_id}.log",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["NtasksPerN:B:S:C"].startswith("2:")
    assert f"afterok:{other.job_id}" in fields["Dependency"]
    assert fields["KillOInInvalidDependent"] == "Yes"
    assert "gpu:2" in fields["TresPerNode"]
    assert fields["Switches"].startswith("1@")


def test_names_that_only_the_site_can_know_arrive_too(desk: Desk, minicluster: Any) -> None:
    until = "Duration=1:00:00 Nodes=node2 Users=root StartTime=now"
    minicluster.output("scontrol", "create", "reservation", "ReservationName=ours", *until.split())
    minicluster.output("scontrol", "update", "NodeName=node2", "AvailableFeatures=fast", "ActiveFeatures=fast")
    try:
        job = desk.held(
            account="root", qos="normal", reservation="ours", constraint="fast", nodelist="node2", memory_per_cpu="512M"
        )
        fields = desk.fields(job)
        told = (fields["Account"], fields["QOS"], fields["Reservation"], fields["Features"], fields["ReqNodeList"])
        assert told == ("root", "normal", "ours", "fast", "node2")
        assert fields["MinMemoryCPU"] == "512M"
        desk.client.cancel(job.job_id)
    finally:
        minicluster.output("scontrol", "delete", "ReservationName=ours")


def test_what_slurm_holds_is_the_script_of_the_plan(desk: Desk) -> None:
    run, plan = desk.plan(sbatch={"hold": True}, setup=["echo 'set up' \"$HOME\" # \\ %"])
    (job,) = desk.launch((run, plan))
    assert job.state == "PENDING"
    assert desk.client.ask(["scontrol", "write", "batch_script", job.job_id, "-"]) == f"{plan.batch_script}"
    job.cancel()
    assert (job.state, job.done()) == ("CANCELLED", True)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"partition": "nowhere"}, "cluster.partition"),
        ({"constraint": "imaginary"}, "cluster.constraint"),
        ({"reservation": "imaginary"}, "cluster.reservation"),
        ({"nodelist": "node99"}, "cluster.nodelist"),
        ({"exclude": "node99"}, "cluster.exclude"),
        ({"memory": "9T"}, "cluster.memory"),
        ({"gpus_per_node": 99}, "cluster.nodes, tasks_per_node, cpus_per_task, gpus_per_node, memory or constraint"),
        ({"dependency": "nonsense"}, "cluster.after or cluster.dependency"),
        ({"mail_type": "NEVER"}, "cluster.mail_type"),
        ({"sbatch": {"bogus": 1}}, "cluster.sbatch.bogus"),
    ],
)
def test_refusals_name_the_key_and_submit_nothing(desk: Desk, cluster: dict[str, Any], key: str) -> None:
    before = desk.queue()
    with pytest.raises(UserError) as caught:
        desk.launch(desk.plan(**cluster))
    assert caught.value.key == key
    assert desk.queue() == before
    assert not (desk.root / "r" / "submissions").exists()


def test_the_checks_see_the_same_before_anything_is_submitted(desk: Desk) -> None:
    cluster = {"partition": "nowhere", "exclude": "node99", "sbatch": {"bogus": 1, "nice": 1}, "after": ["999999"]}
    errors = check_launch(make_config(desk.root, **cluster), desk.site)
    keys = {error.key for error in errors}
    assert keys == {"cluster.partition", "cluster.exclude", "cluster.sbatch.bogus", "cluster.after"}
    for cluster in ({"nodes": 4}, {"cpus_per_task": 9}, {"memory": "9G"}, {"gpus_per_node": 5}):
        assert len(check_launch(make_config(desk.root, **cluster), desk.site)) == 1, cluster
    assert check_launch(make_config(desk.root, nodes=3, cpus_per_task=8, gpus_per_node=4), desk.site) == []


def test_the_site_is_read_as_it_was_set_up(desk: Desk) -> None:
    site = desk.site
    assert (site.kill_wait_s, site.preempt_type, site.accounting) == (30, "preempt/partition_prio", True)
    assert [record.name for record in site.chosen(None)] == ["main"]
    assert (site.shapes_of("main")[0].cpus, site.shapes_of("main")[0].gpus()) == (8, 4)
    graces = {}
    for partition in ("main", "grace", "urgent"):
        config = make_config(partition=partition)
        graces[partition] = derive(site, config, read_request(config)).grace_s
    assert graces == {"main": 30, "grace": 20, "urgent": 30}


def test_a_sweep_is_an_array_that_slurm_throttles(desk: Desk) -> None:
    plans = [desk.plan(f"r{number}", array_parallelism=2, sbatch={"hold": True}) for number in range(3)]
    jobs = desk.launch(*plans)
    array = jobs[0].job_id.split("_")[0]
    assert [job.job_id for job in jobs] == [f"{array}_{task}" for task in range(3)]
    fields = desk.fields(jobs[0])
    assert (fields["ArrayTaskThrottle"], fields["ArrayJobId"]) == ("2", array)
    known = desk.client.jobs([job.job_id for job in jobs])
    assert {job.state for job in known.values()} == {"PENDING"}
    assert len(known) == 3


def test_an_outer_job_leaks_nothing_into_an_inner_one(
    desk: Desk, minicluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = minicluster.output(
        "srun", "--ntasks=2", "--nodes=2", "--distribution=cyclic", "--cpus-per-task=2", "env"
    ).splitlines()
    variables = dict(line.split("=", 1) for line in outer if line.startswith(("SLURM", "SRUN")) and "=" in line)
    assert {"SLURM_JOB_ID", "SLURM_DISTRIBUTION", "SLURM_STEP_ID", "SLURM_CPUS_PER_TASK"} <= set(variables)
    for name, value in {**variables, "MASTER_ADDR": "node1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    run, plan = desk.plan(memory_per_cpu="32M")
    plan = replace(plan, keeper_command=["/bin/sh", "-c", "env"])
    (job,) = desk.launch((run, plan))
    minicluster.wait_job(job.job_id, "COMPLETED")
    seen = dict(
        line.split("=", 1) for line in (run.submissions / f"{job.job_id}.log").read_text().splitlines() if "=" in line
    )
    assert not {"SLURM_DISTRIBUTION", "SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR", "MASTER_ADDR", "RANK"} & set(seen)
    assert seen["SLURM_CPUS_PER_TASK"] == "1"
    assert seen["SLURM_JOB_ID"] == job.job_id


def test_a_job_that_waits_for_a_failed_one_is_cancelled(desk: Desk, minicluster: Any) -> None:
    first = desk.held("first")
    second = desk.launch(desk.plan("second", after=[first.job_id]))[0]
    first.cancel()
    assert minicluster.wait_job(second.job_id, "CANCELLED") == "CANCELLED"
    record = desk.client.job(second.job_id)
    assert record is not None
    assert record.reason == "DependencyNeverSatisfied"


def test_inside_an_allocation_the_run_takes_what_it_needs_of_it(desk: Desk, minicluster: Any) -> None:
    words = ["+cluster=allocation", "cluster.nodes=2", "cluster.tasks_per_node=2", "dry_run=true", "json=true"]
    command = [sys.executable, "-m", "dthpc.submit", *words, f"run.root={desk.root}"]
    done = minicluster.run(["salloc", "--quiet", "--nodes=3", "--ntasks-per-node=2", *command])
    assert done.returncode == 0, done.stderr
    # --ntasks alone may spread unevenly, and a node with too few CPUs is not taken.
    (preview,) = json.loads(done.stdout)["runs"]
    assert preview["kind"] == "allocation"
    assert preview["ranks_command"][:4] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    refused = minicluster.run(["salloc", "--quiet", "--nodes=1", *command])
    assert refused.returncode == 2
    assert "has 1 node" in refused.stdout
    outside = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "in no Slurm allocation" in outside.stdout
