"""Jobs, nodes and partitions of `scontrol show`."""

from __future__ import annotations

import json
import math

import pytest

from dthpc.errors import UserError
from dthpc.slurm.records import as_dict, job_state, parse_jobs, parse_nodes, parse_partitions, state_is_usable

RUNNING = """\
JobId=12 ArrayJobId=10 ArrayTaskId=1 JobName=x
   UserId=me(7) GroupId=me(7)
   Account=(null) QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 ExitCode=0:9
   RunTime=00:01:00 TimeLimit=UNLIMITED TimeMin=N/A
   Partition=p AllocNode:Sid=login:1
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=8 NumTasks=4 CPUs/Task=2
   TRES=cpu=8,mem=2G,node=2,gres/gpu=6
"""


def test_a_running_job() -> None:
    (job,) = parse_jobs(RUNNING)
    assert (job.job_id, job.array_job_id, job.array_task_id) == ("12", "10", "1")
    assert (job.state, job.user, job.account, job.reason) == ("RUNNING", "me", None, None)
    assert (job.nodes, job.batch_host, job.num_nodes) == (["n1", "n2"], "n1", (2, 2))
    assert (job.num_tasks, job.num_cpus, job.cpus_per_task, job.gpus) == (4, 8, 2, 6)
    assert (job.restarts, job.requeue, job.exit_code, job.exit_signal) == (2, True, 0, 9)
    assert (job.run_time_s, job.time_limit_s) == (60, math.inf)
    assert not job.ended
    assert json.loads(json.dumps(as_dict(job), allow_nan=False))["time_limit_s"] == "UNLIMITED"


def test_a_requeued_job_that_waits_has_no_nodes_whatever_its_batch_host_says() -> None:
    text = RUNNING.replace("RUNNING", "PENDING").replace("n[1-2]", "(null)").replace("NumNodes=2", "NumNodes=2-3")
    (job,) = parse_jobs(text)
    assert (job.nodes, job.batch_host, job.num_nodes) == ([], None, (2, 3))


def test_gpus_where_the_site_does_not_count_them() -> None:
    text = RUNNING.replace(",gres/gpu=6", "") + "   TresPerNode=gres:gpu:k80:2\n"
    assert parse_jobs(text)[0].gpus == 4


def test_components_of_a_heterogeneous_job() -> None:
    text = "JobId=5 HetJobId=5 HetJobOffset=0 JobState=PENDING\nJobId=6 HetJobId=5 HetJobOffset=1 JobState=PENDING\n"
    assert [job.het for job in parse_jobs(text)] == ["5+0", "5+1"]


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(UserError, match="NumTasks"):
        parse_jobs("JobId=1 JobState=RUNNING NumTasks=many\n")


def test_a_node() -> None:
    (node,) = parse_nodes(
        "NodeName=g1 CoresPerSocket=4\n   CPUAlloc=0 CPUEfctv=14 CPUTot=16\n   ActiveFeatures=a,b\n"
        "   Gres=gpu:t4-x:2(S:0)\n   RealMemory=1024 Sockets=2\n   State=MIXED+DRAIN ThreadsPerCore=2\n"
        "   Partitions=p,q \n   CfgTRES=cpu=16,gres/gpu=2\n   AllocTRES=gres/gpu=1\n   Reason=disk = full [root@t]\n"
    )
    assert (node.name, node.usable, node.state) == ("g1", False, "MIXED+DRAIN")
    assert (node.cpus, node.usable_cpus, node.sockets, node.cores_per_socket, node.threads_per_core) == (
        16,
        14,
        2,
        4,
        2,
    )
    assert (node.gpus, node.gpu_type, node.alloc_gpus, node.real_memory_mb) == (2, "t4-x", 1, 1024)
    assert (node.partitions, node.features, node.reason) == (["p", "q"], ["a", "b"], "disk = full [root@t]")


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("ALLOCATED", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("idle~", True),
        ("mix-", True),
        ("plnd", True),
        ("resv", False),
        ("IDLE+DRAIN", False),
        ("drng", False),
        ("down*", False),
        ("idle*", False),
        ("IDLE+NOT_RESPONDING", False),
        ("maint", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_usable_states(state: str, usable: bool) -> None:
    assert state_is_usable(state) is usable


def test_a_partition() -> None:
    (partition,) = parse_partitions(
        "PartitionName=p\n   Default=YES QoS=N/A\n   DefaultTime=NONE GraceTime=20\n   MaxNodes=UNLIMITED "
        "MaxTime=1-00:00:00 MinNodes=1 MaxCPUsPerNode=UNLIMITED\n   Nodes=n[1-3]\n   PreemptMode=REQUEUE\n"
        "   State=UP TotalCPUs=24 TotalNodes=3\n"
    )
    assert (partition.name, partition.default, partition.state, partition.nodes) == ("p", True, "UP", "n[1-3]")
    assert (partition.max_time_s, partition.default_time_s, partition.grace_time_s) == (86400, None, 20)
    assert (partition.max_nodes, partition.min_nodes, partition.total_nodes) == (math.inf, 1, 3)
    assert (partition.preempt_mode, partition.qos) == ("REQUEUE", None)


def test_requested_resources_of_a_job_that_has_none_yet() -> None:
    (job,) = parse_jobs("JobId=1 UserId=x(UNKNOWN) JobState=PENDING\n  ReqTRES=cpu=2,gres/gpu=4\n  AllocTRES=(null)\n")
    assert (job.gpus, job.user) == (4, "x")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 5", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("RE+", "RE+"),
        ("", "UNKNOWN"),
    ],
)
def test_states_with_an_addition_or_cut(text: str, state: str) -> None:
    assert job_state(text) == state
