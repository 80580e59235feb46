"""What the site says, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.launch.request import read_request
from dthpc.launch.site import Decisions, QosLimits, Site, derive, probe
from tests.launch.sites import add_command, client_of, make_config, make_partition, make_site

CONFIG = """\
SLURM_VERSION = 23.11.1
KillWait = 45 sec
PreemptMode = GANG,REQUEUE
PreemptType = preempt/qos
PreemptParameters = send_user_signal
JobRequeue = 0
SelectType = select/cons_tres
TaskPlugin = task/affinity,task/cgroup
AccountingStorageType = accounting_storage/slurmdbd
MaxArraySize = 17
"""


def decide(site: Site | None, lead: int | None = None, **cluster: Any) -> Decisions:
    config = make_config(**cluster)
    config.checkpoint.save_lead_s = lead
    return derive(site, config, read_request(config))


def test_probe_reads_all_answers(tmp_path: Path) -> None:
    partition = "PartitionName=p Default=YES Nodes=n1 TotalNodes=1 State=UP"
    add_command(tmp_path, "scontrol", f'case "$*" in *partition*) echo "{partition}";; *) echo "{CONFIG}";; esac')
    add_command(tmp_path, "sinfo", 'echo "p|1|64|512000+|gpu:h100:4(S:0-1),nic:2|mixed*"')
    add_command(tmp_path, "sacctmgr", 'echo "urgent|00:00:50|requeue"')
    for name in ("sbatch", "srun"):
        add_command(tmp_path, name, "exit 1")
    site = probe(client_of(tmp_path), "urgent")
    assert (site.version, site.kill_wait_s, site.job_requeue, site.max_array_size) == ((23, 11, 1), 45, False, 17)
    assert (site.user_signal_on_preemption, site.binds_cores, site.accounting) == (True, True, True)
    assert [record.name for record in site.chosen(None)] == ["p"]
    (shape,) = site.shapes_of("p")
    assert (shape.cpus, shape.memory_mb, shape.gpus(), shape.gpus("h100"), shape.gpus("a100")) == (64, 512000, 4, 4, 0)
    assert not shape.usable
    assert site.qos == QosLimits("urgent", 50, "REQUEUE")
    json.dumps(site.as_dict(), allow_nan=False)


def test_probe_without_slurm_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="module load slurm"):
        probe(client_of(tmp_path))


@pytest.mark.parametrize(
    ("time", "lead"), [("1:00:00", 300), ("20:00", 120), ("5", 30), ("1", 15), ("2-0", 300), ("UNLIMITED", 300)]
)
def test_the_lead_follows_the_time_limit(time: str, lead: int) -> None:
    decisions = decide(make_site(), time=time)
    assert (decisions.lead_s, decisions.signal) == (lead, f"USR2@{lead}")
    assert "60 s earlier" in decisions.reasons["signal"]


def test_a_lead_that_was_asked_wins() -> None:
    decisions = decide(make_site(), 77)
    assert decisions.signal == "USR2@77"
    assert "checkpoint.save_lead_s=77" in decisions.reasons["signal"]


@pytest.mark.parametrize(
    ("site", "partition", "grace", "told"),
    [
        ({}, "main", 30, "GraceTime=0: SIGTERM, then KillWait=30"),
        ({}, "grace", 20, "SIGTERM at once, then GraceTime=20"),
        ({}, "grace,main", 20, "partition grace"),
        ({"user_signal_on_preemption": True}, "grace", 20, "SIGUSR2 at once"),
        ({"preempt_type": "preempt/none"}, "grace", 30, "is not preempted"),
        ({"preempt_type": "preempt/qos"}, "grace", 30, "GraceTime=0"),
        (
            {"preempt_type": "preempt/qos", "qos": QosLimits("low", 40, "CANCEL")},
            "grace",
            40,
            "QOS low is preempted (CANCEL)",
        ),
        ({"partitions": [make_partition("main", PreemptMode="OFF")]}, "main", 30, "is not preempted"),
    ],
)
def test_grace(site: dict[str, Any], partition: str, grace: float, told: str) -> None:
    decisions = decide(make_site(**site), partition=partition)
    assert decisions.grace_s == grace
    assert told in decisions.preemption


@pytest.mark.parametrize(
    ("kind", "asked", "requeue"),
    [
        ("slurm", "auto", "requeue"),
        ("slurm", "resubmit", "resubmit"),
        ("slurm", "never", "never"),
        ("allocation", "auto", "restart"),
        ("local", "auto", "restart"),
        ("local", "never", "never"),
    ],
)
def test_requeue(kind: str, asked: str, requeue: str) -> None:
    decisions = decide(None if kind == "local" else make_site(), kind=kind, requeue=asked)
    assert decisions.requeue == requeue
    assert decisions.reasons["requeue"]
    json.dumps(decisions.as_dict(), allow_nan=False)


def test_a_site_without_requeue_is_overridden() -> None:
    assert "--requeue overrides it" in decide(make_site(job_requeue=False)).reasons["requeue"]
