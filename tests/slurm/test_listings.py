"""`squeue`, `sinfo` and `scontrol show config`."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.listings import SQUEUE_COLUMNS, SlurmConfig, default_partition, parse_sinfo, parse_squeue, usable_nodes


def test_squeue_in_its_default_form() -> None:
    text = (
        "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
        "         41_[2-9%3]      main     name       me PD       0:00      2 (Priority)\n"
        "              41_1      main     name       me  R    1-1:00      2 n[1-2]\n"
    ).replace("1-1:00", "1:01:00")
    waiting, running = parse_squeue(text)
    assert (waiting.state, waiting.reason, waiting.nodes, waiting.array_task_id) == (
        "PENDING",
        "Priority",
        [],
        "[2-9%3]",
    )
    assert (running.job_id, running.array_job_id, running.array_task_id) == ("41_1", "41", "1")
    assert (running.state, running.nodes, running.run_time_s, running.reason) == ("RUNNING", ["n1", "n2"], 3660, None)


def test_squeue_with_chosen_columns() -> None:
    line = "41_1|COMPLETING|None|main|me|0:05|UNLIMITED|2030-01-01T00:00:00|1|n3\n"
    (job,) = parse_squeue(line, list(SQUEUE_COLUMNS))
    assert (job.state, job.reason, job.start_time, job.nodes) == ("COMPLETING", None, "2030-01-01T00:00:00", ["n3"])


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(UserError, match="is no state of a job"):
        parse_squeue("JOBID ST\n1 QQ\n")


def test_sinfo() -> None:
    groups = parse_sinfo(
        "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n"
        "main*        up   infinite      1  drain n1\n"
        "main*        up   infinite      2    mix n[2-3]\n"
        "shut       down    1:00:00      1   idle n4\n"
    )
    assert default_partition(groups) == "main"
    assert usable_nodes(groups) == ["n2", "n3"]
    assert [group.count for group in groups] == [1, 2, 1]
    assert groups[2].time_limit_s == 3600


def test_sinfo_summary_and_nodes() -> None:
    (group,) = parse_sinfo("PARTITION AVAIL TIMELIMIT NODES(A/I/O/T) NODELIST\np up 1:00 1/1/0/2 n[1-2]\n")
    assert (group.partition, group.nodes, group.count) == ("p", ["n1", "n2"], 2)
    (group,) = parse_sinfo("NODELIST NODES PARTITION STATE\nn1 1 p* idle*\n")
    assert (group.default, group.usable, group.nodes) == (True, False, ["n1"])


def test_config() -> None:
    config = SlurmConfig(
        "KillWait                = 30 sec\nSLURM_VERSION           = 23.11.4\nPreemptMode = (null)\n"
        "PreemptParameters = send_user_signal,min_exempt_priority=5\nAccountingStorageType = accounting_storage/none\n"
    )
    assert config.seconds("killwait", 5) == 30
    assert config.version == (23, 11, 4)
    assert config.get("PreemptMode", "OFF") == "OFF"
    assert config.flags("PreemptParameters") == {"send_user_signal", "min_exempt_priority"}
    assert not config.accounting
