"""Jobs as `sacct` shows them: with separators and a header, headless, or in its default form of fixed columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from dthpc.errors import UserError
from dthpc.slurm.hostlist import expand
from dthpc.slurm.keyvalues import clean_lines
from dthpc.slurm.records import JOB_STATES, JobRecord, exit_status, job_state
from dthpc.slurm.tables import Row, parse_table, separated_rows
from dthpc.slurm.units import gpus_of_tres, is_absent, memory_to_bytes, optional_seconds, parse_tres, time_to_seconds

SACCT_COLUMNS = [
    *("JobID", "User", "Partition", "Account", "QOS", "State", "ExitCode", "Elapsed", "Timelimit", "NNodes"),
    *("AllocTRES", "Submit", "Start", "End", "NodeList"),
]
"""The columns that dthpc asks of sacct. None of them can hold the separator."""

_JOB_ID = re.compile(r"(?P<job>\d+(?:_(?:\d+|\[[^\]]*\]))?(?:\+\d+)?)(?:\.(?P<step>\S+))?", re.ASCII)
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", re.ASCII)
_SPAN = re.compile(r"(?:\d+-)?\d+:\d\d:\d\d", re.ASCII)


def parse_sacct(text: str, columns: Sequence[str] | None = None) -> dict[str, JobRecord]:
    """The jobs of `sacct` by id; their steps only add what is known of a step alone (the largest memory).

    Args:
        text: the output.
        columns: names of the columns, for a headless output (`-n`). Without them, a headless output gives what its
            cells prove by themselves: id, state, exit code, TRES with the number of nodes, start, end and elapsed time.

    Raises:
        UserError: the text has no known form, or a cell cannot be told from its neighbour.
    """
    first = next((line for line in clean_lines(text) if line.strip()), "")
    if columns:
        rows = separated_rows(text, columns, "sacct")
    elif "|" in first and _JOB_ID.fullmatch(first.split("|")[0]):
        rows = _recognised_rows(text, len(first.split("|")))
    else:
        rows = parse_table(text, ["JobID", "JobIDRaw"], "sacct")
    jobs: dict[str, list[Row]] = {}
    for row in rows:
        match = _JOB_ID.fullmatch(row.get("JobID") or row.get("JobIDRaw") or "")
        if match is None:
            raise UserError("is no job id", key="sacct", value=row.get("JobID"))
        jobs.setdefault(match["job"], []).append(row)
    return {job_id: _job(job_id, found) for job_id, found in jobs.items()}


def _job(job_id: str, rows: list[Row]) -> JobRecord:
    """A job from its own line (the one that is no step), and its steps."""
    own = next((row for row in rows if "." not in (row.get("JobID") or row.get("JobIDRaw") or "")), rows[0])
    # A cell that was cut at its column's width tells nothing that can be trusted; only a state can be completed.
    own = {name: value for name, value in own.items() if name == "State" or not value.endswith("+")}
    state = job_state(own.get("State", ""))
    if state not in JOB_STATES:
        raise UserError("is no state of a job", key="sacct", value=own.get("State"))
    tres = parse_tres(own.get("AllocTRES") or own.get("ReqTRES") or "")
    count = own.get("NNodes") or own.get("AllocNodes") or tres.get("node", "")
    listed = own.get("NodeList", "")
    code, signal = exit_status(own.get("ExitCode"))
    memory = [memory_to_bytes(row["MaxRSS"], "") // 1024 for row in rows if not is_absent(row.get("MaxRSS", ""))]
    array = re.fullmatch(r"(\d+)_(.+)", job_id)
    het = re.fullmatch(r"(\d+)\+(\d+)", job_id)
    restarts = own.get("Restarts", "")
    return JobRecord(
        job_id=job_id,
        state=state,
        source="sacct",
        name=own.get("JobName") or None,
        user=own.get("User") or None,
        partition=own.get("Partition") or None,
        account=own.get("Account") or None,
        qos=own.get("QOS") or None,
        nodes=[] if is_absent(listed) or listed == "None assigned" else expand(listed),
        num_nodes=(int(count), int(count)) if count.isdigit() else None,
        num_cpus=int(own["AllocCPUS"]) if own.get("AllocCPUS", "").isdigit() else None,
        gpus=gpus_of_tres(tres)[0],
        restarts=int(restarts) if restarts.isdigit() else None,
        exit_code=code,
        exit_signal=signal,
        run_time_s=optional_seconds(own.get("Elapsed", "")),
        time_limit_s=optional_seconds(own.get("Timelimit", "")),
        submit_time=_stamp(own, "Submit"),
        start_time=_stamp(own, "Start"),
        end_time=_stamp(own, "End"),
        array_job_id=array[1] if array else None,
        array_task_id=array[2] if array else None,
        het_job_id=het[1] if het else None,
        het_offset=int(het[2]) if het else None,
        max_rss_kb=max(memory, default=None),
        tres=tres,
        fields=own,
    )


def _stamp(row: Row, key: str) -> str | None:
    text = row.get(key, "")
    return None if is_absent(text) else text


def _recognised_rows(text: str, width: int) -> list[Row]:
    """The rows of a headless output, with names for the columns whose cells can be nothing else."""
    cells = [list(row.values()) for row in separated_rows(text, [str(index) for index in range(width)], "sacct")]
    names: dict[int, str] = {0: "JobID"}
    for index in range(1, width):
        column = [row[index] for row in cells]
        if all(re.fullmatch(r"\d+:\d+", cell) for cell in column):
            names[index] = "ExitCode"
        elif all(cell and job_state(cell) in JOB_STATES for cell in column):
            names[index] = "State"
        elif all(re.search(r"(^|,)(cpu|node)=\d", cell) for cell in column):
            names[index] = "AllocTRES"
    names.update(_recognised_times(cells[0]))
    if not {"State", "ExitCode"} <= set(names.values()) or len(set(names.values())) < len(names):
        raise UserError(
            "a headless output whose columns are not told apart by their cells",
            key="sacct",
            value="|".join(cells[0]),
            instead="keep the header (leave out -n), or name the columns",
        )
    return [{name: row[index] for index, name in names.items()} for row in cells]


def _recognised_times(row: list[str]) -> dict[int, str]:
    """Start, end and elapsed time: the columns of which one is the difference of the two others."""
    stamps = [(index, datetime.fromisoformat(cell)) for index, cell in enumerate(row) if _STAMP.fullmatch(cell)]
    spans = [(index, time_to_seconds(cell)) for index, cell in enumerate(row) if _SPAN.fullmatch(cell)]
    found = [
        {start: "Start", end: "End", span: "Elapsed"}
        for start, begun in stamps
        for end, ended in stamps
        for span, seconds in spans
        if start < end and (ended - begun).total_seconds() == seconds
    ]
    return found[0] if len(found) == 1 else {}
