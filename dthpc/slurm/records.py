"""Jobs, nodes and partitions as `scontrol show` prints them, and jobs as `squeue` and `sacct` do: one class each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from dthpc.errors import UserError
from dthpc.slurm.hostlist import expand
from dthpc.slurm.keyvalues import Record, parse_records
from dthpc.slurm.units import (
    gpus_of_gres,
    gpus_of_tres,
    is_absent,
    memory_to_bytes,
    optional_seconds,
    parse_gres,
    parse_tres,
    words,
)

FINAL_STATES = words("BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT")
"""States after which a job does not run again, unless it is requeued."""

JOB_STATES = FINAL_STATES | words(
    "CONFIGURING COMPLETING EXPEDITING LAUNCH_FAILED PENDING POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED "
    "REQUEUE_HOLD RESIZING RESV_DEL_HOLD RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED UPDATE_DB"
)
"""All states of jobs."""

_UNUSABLE = words(
    "DOWN DRAIN DRAINED DRAINING DRNG FAIL FAILING FAILG FUTURE FUTR INVAL INVALID INVALID_REG MAINT NOT_RESPONDING "
    "NO_RESPOND ERROR UNKNOWN UNK PERFCTRS NPC BLOCKED BLOCK RESERVED RESV"
)
_IDLE_LIKE = words("IDLE MIXED MIX ALLOCATED ALLOC COMPLETING COMP PLANNED PLND")
# Where there are several, the first that tells something counts: newer versions tell requested and allocated apart.
_TRES = ("TRES", "AllocTRES", "ReqTRES")
# Marks of sinfo: `*` not responding, `$` maintenance; the others (`~ # ! % @ ^ - +`) tell of power, boot or planning.
_UNUSABLE_MARKS = frozenset("*$")


@dataclass(frozen=True)
class JobRecord:
    """One job, from whichever of Slurm's commands knew it."""

    job_id: str
    """Id; `36_2` for a task of an array that Slurm names so."""

    state: str
    """Slurm's long state, such as `RUNNING`."""

    source: str
    """The command that told: `scontrol`, `squeue` or `sacct`."""

    name: str | None = None
    user: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None

    reason: str | None = None
    """Why it waits, or why it ended, in Slurm's words."""

    nodes: list[str] = field(default_factory=list)
    """Allocated nodes; empty while it waits, also where Slurm still shows those of an earlier start."""

    batch_host: str | None = None
    """Node of the batch script, while the job has nodes."""

    num_nodes: tuple[int, int] | None = None
    """Fewest and most nodes."""

    num_tasks: int | None = None
    num_cpus: int | None = None
    cpus_per_task: float | None = None
    gpus: int = 0

    restarts: int | None = None
    """Times that it was requeued."""

    requeue: bool | None = None
    """Whether it may be requeued."""

    exit_code: int | None = None
    exit_signal: int | None = None

    run_time_s: float | None = None
    time_limit_s: float | None = None
    """Infinite where there is no limit."""

    submit_time: str | None = None
    start_time: str | None = None
    """For a waiting job an estimate."""

    end_time: str | None = None
    dependency: str | None = None
    comment: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None

    het_job_id: str | None = None
    het_offset: int | None = None

    max_rss_kb: int | None = None
    """Largest resident memory of a task over all steps, from accounting."""

    tres: dict[str, str] = field(default_factory=dict)
    fields: Record = field(default_factory=dict)
    """All that Slurm said, as text."""

    @property
    def ended(self) -> bool:
        """Whether it is in a final state. A requeued job leaves it again."""
        return self.state in FINAL_STATES

    @property
    def het(self) -> str | None:
        """`ID+OFFSET` of a component of a heterogeneous job."""
        return None if self.het_offset is None else f"{self.het_job_id}+{self.het_offset}"


@dataclass(frozen=True)
class NodeRecord:
    """One node of `scontrol show node`."""

    name: str
    state: str
    """As printed, such as `IDLE+DRAIN`."""

    usable: bool
    """Whether any job is started on it: not down, drained, failing, reserved, in maintenance or silent."""

    cpus: int
    usable_cpus: int
    """CPUs without those reserved for the system (`CPUEfctv`)."""

    sockets: int
    cores_per_socket: int
    threads_per_core: int
    gpus: int
    gpu_type: str | None
    alloc_gpus: int
    real_memory_mb: int
    partitions: list[str]
    features: list[str]
    reason: str | None
    fields: Record


@dataclass(frozen=True)
class PartitionRecord:
    """One partition of `scontrol show partition`. Times in seconds, infinite where there is no limit."""

    name: str
    state: str
    """`UP`, `DOWN`, `DRAIN` or `INACTIVE`."""

    default: bool
    max_time_s: float
    default_time_s: float | None
    max_nodes: float
    min_nodes: int
    total_nodes: int
    total_cpus: int
    nodes: str
    """Its nodes as a host list."""

    grace_time_s: float
    preempt_mode: str | None
    """The partition's own mode; `None` where the cluster's holds."""

    qos: str | None
    max_cpus_per_node: float
    fields: Record


def parse_jobs(text: str) -> list[JobRecord]:
    """The jobs of `scontrol show job`, heterogeneous and one-line ones too.

    Raises:
        UserError: the text holds no job, or a value is not what Slurm prints there.
    """
    return [_job(record) for record in parse_records(text, "JobId")]


def parse_nodes(text: str) -> list[NodeRecord]:
    """The nodes of `scontrol show node`.

    Raises:
        UserError: the text holds no node, or a value is not what Slurm prints there.
    """
    return [_node(record) for record in parse_records(text, "NodeName")]


def parse_partitions(text: str) -> list[PartitionRecord]:
    """The partitions of `scontrol show partition`.

    Raises:
        UserError: the text holds no partition, or a value is not what Slurm prints there.
    """
    return [_partition(record) for record in parse_records(text, "PartitionName")]


def state_is_usable(state: str) -> bool:
    """Whether jobs are started on a node of this state, as printed by scontrol (`IDLE+DRAIN`) or sinfo (`down*`)."""
    marks = set(re.sub(r"[A-Za-z_+]", "", state))
    flags = {word.strip("*~#!%$@^-").upper() for word in state.split("+")} - {""}
    return bool(flags & _IDLE_LIKE) and not flags & _UNUSABLE and not marks & _UNUSABLE_MARKS


def number(record: Record, key: str, default: int = 0) -> int:
    """A whole number of a record; `default` where Slurm gives none.

    Raises:
        UserError: the value is no number.
    """
    text = record.get(key, "")
    if is_absent(text) or text == "*":
        return default
    match = re.fullmatch(r"(\d+)(K?)", text, re.ASCII)
    if match is None:
        raise UserError("is no number", key=key, value=repr(text))
    return int(match[1]) * (1000 if match[2] else 1)


def optional(record: Record, key: str) -> str | None:
    """A text of a record, or `None` where Slurm says that there is none."""
    text = record.get(key, "")
    return None if is_absent(text) else text


def exit_status(text: str | None) -> tuple[int | None, int | None]:
    """Exit code and signal of `1:0`."""
    match = re.fullmatch(r"(\d+):(\d+)", text or "", re.ASCII)
    return (int(match[1]), int(match[2])) if match else (None, None)


def job_state(text: str) -> str:
    """The state alone, of `CANCELLED by 1000`, `CANCELLED+` or `OUT_OF_ME+` (cut at the width of a column)."""
    word = text.split()[0].upper() if text.strip() else "UNKNOWN"
    cut = word.removesuffix("+")
    if cut == word or cut in JOB_STATES:
        return cut
    whole = [state for state in JOB_STATES if state.startswith(cut)]
    return whole[0] if len(whole) == 1 else word


def _job(record: Record) -> JobRecord:
    state = job_state(record.get("JobState", ""))
    # After a requeue Slurm goes on showing the BatchHost of the earlier start: only a node list proves an allocation.
    listed = optional(record, "NodeList")
    tres = parse_tres(next((text for key in _TRES if (text := optional(record, key))), ""))
    nodes = expand(listed) if listed else []
    code, signal = exit_status(record.get("ExitCode"))
    offset = optional(record, "HetJobOffset") or optional(record, "PackJobOffset")
    return JobRecord(
        job_id=record["JobId"],
        state=state,
        source="scontrol",
        name=optional(record, "JobName"),
        user=re.sub(r"\([^()]*\)$", "", record.get("UserId", "")) or None,
        partition=optional(record, "Partition"),
        account=optional(record, "Account"),
        qos=optional(record, "QOS"),
        reason=optional(record, "Reason"),
        nodes=nodes,
        batch_host=optional(record, "BatchHost") if nodes else None,
        num_nodes=_bounds(record.get("NumNodes", "")),
        num_tasks=number(record, "NumTasks") or None,
        num_cpus=_bounds(record.get("NumCPUs", ""))[0] or None,
        cpus_per_task=float(number(record, "CPUs/Task")) or None,
        gpus=_gpus_of_job(record, tres, len(nodes)),
        restarts=number(record, "Restarts") if "Restarts" in record else None,
        requeue=record["Requeue"] == "1" if "Requeue" in record else None,
        exit_code=code,
        exit_signal=signal,
        run_time_s=optional_seconds(record.get("RunTime", "")),
        time_limit_s=optional_seconds(record.get("TimeLimit", "")),
        submit_time=optional(record, "SubmitTime"),
        start_time=optional(record, "StartTime"),
        end_time=optional(record, "EndTime"),
        dependency=optional(record, "Dependency"),
        comment=optional(record, "Comment"),
        array_job_id=optional(record, "ArrayJobId"),
        array_task_id=optional(record, "ArrayTaskId"),
        het_job_id=optional(record, "HetJobId") or optional(record, "PackJobId"),
        het_offset=int(offset) if offset and offset.isdigit() else None,
        tres=tres,
        fields=record,
    )


def _gpus_of_job(record: Record, tres: dict[str, str], nodes: int) -> int:
    """GPUs of all nodes. A site that does not track them as TRES shows only what was asked for."""
    counted = gpus_of_tres(tres)[0]
    if counted:
        return counted
    each = gpus_of_gres(parse_gres(record.get("TresPerNode") or record.get("Gres") or ""))[0]
    return each * max(nodes, _bounds(record.get("NumNodes", ""))[0])


def _bounds(text: str) -> tuple[int, int]:
    """`2` or `2-4` as fewest and most; zeros where there is none."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def _node(record: Record) -> NodeRecord:
    gpus, kind = gpus_of_gres(parse_gres(record.get("Gres", "")))
    cpus = number(record, "CPUTot")
    state = record.get("State", "UNKNOWN")
    return NodeRecord(
        name=record["NodeName"],
        state=state,
        usable=state_is_usable(state),
        cpus=cpus,
        usable_cpus=number(record, "CPUEfctv", cpus),
        sockets=number(record, "Sockets"),
        cores_per_socket=number(record, "CoresPerSocket"),
        threads_per_core=number(record, "ThreadsPerCore"),
        gpus=gpus or gpus_of_tres(parse_tres(record.get("CfgTRES", "")))[0],
        gpu_type=kind,
        alloc_gpus=gpus_of_tres(parse_tres(record.get("AllocTRES", "")))[0],
        real_memory_mb=memory_to_bytes(record.get("RealMemory", "0")) // 2**20,
        partitions=[name for name in record.get("Partitions", "").split(",") if not is_absent(name)],
        features=[name for name in record.get("ActiveFeatures", "").split(",") if not is_absent(name)],
        reason=optional(record, "Reason"),
        fields=record,
    )


def _partition(record: Record) -> PartitionRecord:
    mode = optional(record, "PreemptMode")
    return PartitionRecord(
        name=record["PartitionName"],
        state=record.get("State", "UNKNOWN"),
        default=record.get("Default", "NO") == "YES",
        max_time_s=_limit(optional_seconds(record.get("MaxTime", ""))),
        default_time_s=optional_seconds(record.get("DefaultTime", "")),
        max_nodes=_count_limit(record, "MaxNodes"),
        min_nodes=number(record, "MinNodes"),
        total_nodes=number(record, "TotalNodes"),
        total_cpus=number(record, "TotalCPUs"),
        nodes=optional(record, "Nodes") or "",
        grace_time_s=_limit(optional_seconds(record.get("GraceTime", "0")), 0.0),
        preempt_mode=mode,
        qos=optional(record, "QoS"),
        max_cpus_per_node=_count_limit(record, "MaxCPUsPerNode"),
        fields=record,
    )


def _limit(seconds: float | None, absent: float = math.inf) -> float:
    return absent if seconds is None else seconds


def _count_limit(record: Record, key: str) -> float:
    return math.inf if record.get(key, "UNLIMITED") in ("UNLIMITED", "INFINITE", "NONE") else number(record, key)


def as_dict(job: JobRecord) -> dict[str, Any]:
    """A job for JSON: what is known, without Slurm's own text; a time without limit is `UNLIMITED`."""
    known = {name: value for name, value in vars(job).items() if name != "fields" and value not in (None, [], {})}
    if job.time_limit_s is not None and math.isinf(job.time_limit_s):
        known["time_limit_s"] = "UNLIMITED"
    return known
