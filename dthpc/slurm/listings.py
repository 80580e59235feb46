"""Jobs and nodes as the listings of `squeue` and `sinfo` show them, and the settings of `scontrol show config`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from dthpc.errors import UserError
from dthpc.slurm.hostlist import expand
from dthpc.slurm.keyvalues import Record, parse_assignments
from dthpc.slurm.records import JOB_STATES, JobRecord, job_state, state_is_usable
from dthpc.slurm.tables import Row, parse_table, separated_rows
from dthpc.slurm.units import is_absent, optional_seconds, time_to_seconds, words

SQUEUE_COLUMNS = {
    "JOBID": "%i",
    "STATE": "%T",
    "REASON": "%r",
    "PARTITION": "%P",
    "USER": "%u",
    "TIME": "%M",
    "TIME_LIMIT": "%l",
    "START_TIME": "%S",
    "NODES": "%D",
    "NODELIST": "%N",
}
"""The columns that dthpc asks of squeue, and their format letters. None of them can hold the separator."""

SINFO_COLUMNS = {"PARTITION": "%R", "NODES": "%D", "CPUS": "%c", "MEMORY": "%m", "GRES": "%G", "STATE": "%T"}
"""The columns that dthpc asks of sinfo, and their format letters."""

_SHORT_STATES = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}


@dataclass(frozen=True)
class NodeGroup:
    """One line of sinfo: nodes of one partition in one state."""

    partition: str
    default: bool
    """Whether jobs go to this partition that name none."""

    available: bool
    """Whether the partition takes jobs (`up`)."""

    state: str
    usable: bool
    """Whether jobs are started on these nodes."""

    count: int
    nodes: list[str]
    time_limit_s: float | None
    row: Row


def parse_squeue(text: str, columns: Sequence[str] | None = None) -> list[JobRecord]:
    """The jobs of `squeue`, in its default form, another with a header, or headless `|` columns of known names.

    Raises:
        UserError: no header is found, or a cell cannot be told from its neighbour.
    """
    rows = separated_rows(text, columns, "squeue") if columns else parse_table(text, ["JOBID", "JOBID(S)"], "squeue")
    return [_queued_job(row) for row in rows]


def parse_sinfo(text: str) -> list[NodeGroup]:
    """The lines of `sinfo`, summarised (`-s`), by partition or by node (`-N`).

    Raises:
        UserError: no header is found, or a cell cannot be told from its neighbour.
    """
    return [_node_group(row) for row in parse_table(text, ["PARTITION", "NODELIST"], "sinfo")]


def default_partition(groups: Sequence[NodeGroup]) -> str | None:
    """The partition that sinfo marks as the default."""
    return next((group.partition for group in groups if group.default), None)


def usable_nodes(groups: Sequence[NodeGroup]) -> list[str]:
    """Names of the nodes on which jobs are started, each once, in the order shown."""
    return list(dict.fromkeys(name for group in groups if group.usable for name in group.nodes))


class SlurmConfig:
    """The settings of `scontrol show config`."""

    def __init__(self, text: str) -> None:
        """Read the output.

        Raises:
            UserError: it holds no setting.
        """
        self.values: Record = parse_assignments(text)
        self._lower = {key.lower(): value for key, value in self.values.items()}

    def get(self, key: str, default: str = "") -> str:
        """A setting, whatever the case of its name; `default` where Slurm has none."""
        value = self._lower.get(key.lower(), "(null)")
        return default if is_absent(value) else value

    def seconds(self, key: str, default: float) -> float:
        """A setting that is a time, such as `30 sec`."""
        value = self.get(key)
        return time_to_seconds(value) if value else default

    def flags(self, key: str) -> frozenset[str]:
        """The lower-case words of a setting that holds several, values of `word=value` dropped."""
        return frozenset(word.partition("=")[0].strip().lower() for word in self.get(key).split(",") if word)

    @property
    def version(self) -> tuple[int, ...]:
        """Slurm's version, such as (22, 5, 8); empty where it is not told."""
        parts = re.match(r"\d+(?:\.\d+)*", self.get("SLURM_VERSION"))
        return tuple(int(part) for part in parts.group().split(".")) if parts else ()

    @property
    def accounting(self) -> bool:
        """Whether sacct can answer."""
        return self.get("AccountingStorageType", "accounting_storage/none") not in ("accounting_storage/none", "none")


def _queued_job(row: Row) -> JobRecord:
    state = job_state(row.get("STATE") or row.get("ST") or "")
    state = _SHORT_STATES.get(state, state)
    if state not in JOB_STATES | words("UNKNOWN"):
        raise UserError("is no state of a job", key="squeue", value=state)
    place = row.get("NODELIST(REASON)", row.get("NODELIST", ""))
    reason = re.fullmatch(r"\((.*)\)", place)
    job_id = row.get("JOBID") or row.get("JOBID(S)") or ""
    array = re.fullmatch(r"(\d+)_(.+)", job_id)
    het = re.fullmatch(r"(\d+)\+(\d+)", job_id)
    count = row.get("NODES", "")
    return JobRecord(
        job_id=job_id,
        state=state,
        source="squeue",
        name=row.get("NAME"),
        user=row.get("USER"),
        partition=row.get("PARTITION"),
        reason=reason[1] if reason else (None if is_absent(row.get("REASON", "")) else row["REASON"]),
        nodes=[] if reason or is_absent(place) else expand(place),
        num_nodes=(int(count), int(count)) if count.isdigit() else None,
        run_time_s=optional_seconds(row.get("TIME", "")),
        time_limit_s=optional_seconds(row.get("TIME_LIMIT", "")),
        start_time=None if is_absent(row.get("START_TIME", "")) else row["START_TIME"],
        array_job_id=array[1] if array else None,
        array_task_id=array[2] if array else None,
        het_job_id=het[1] if het else None,
        het_offset=int(het[2]) if het else None,
        fields=row,
    )


def _node_group(row: Row) -> NodeGroup:
    name = row.get("PARTITION", "")
    state = row.get("STATE", "")
    available = row.get("AVAIL", "up").lower() == "up"
    nodes = expand(row.get("NODELIST", ""))
    count = "".join(takewhile(str.isdigit, row.get("NODES", "")))
    return NodeGroup(
        partition=name.rstrip("*"),
        default=name.endswith("*"),
        available=available,
        state=state,
        usable=available and state_is_usable(state),
        count=int(count) if count else len(nodes),
        nodes=nodes,
        time_limit_s=optional_seconds(row.get("TIMELIMIT", "")),
        row=row,
    )
