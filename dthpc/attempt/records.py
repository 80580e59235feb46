"""What the keeper writes of an attempt: its start, its end, and the end of one that vanished."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dthpc.attempt.lock import machine_identity
from dthpc.monitor.events import EventLog
from dthpc.resilience.attempts import Attempt, committed_checkpoints, config_digest, read_attempts
from dthpc.resilience.decide import Decision, causes_in_log
from dthpc.resilience.outcome import first_failure, read_records
from dthpc.rundir import AttemptDir, RunDir, write_json
from dthpc.slurm.hostlist import expand

if TYPE_CHECKING:
    from dthpc.attempt.keeper import Keeper

_LOG_TAIL = 64 * 1024


def begin_attempt(keeper: Keeper, world_size: int) -> AttemptDir:
    """Take the next number, and record what the attempt starts with."""
    run, env = keeper.run, keeper.env
    folder = _next_folder(run)
    in_slurm = keeper.in_slurm
    holder = keeper.lock.holder
    start = {
        "attempt": folder.number,
        "chain": keeper.chain,
        "kind": keeper.plan.kind,
        "job_id": _job_name(env) if in_slurm else None,
        "slurm_job_id": env.get("SLURM_JOB_ID") if in_slurm else None,
        "restart_count": int(env.get("SLURM_RESTART_COUNT") or 0) if in_slurm else 0,
        "nodes": _nodes(env, holder.host, in_slurm),
        "world_size": world_size,
        "host": holder.host,
        "pid": holder.pid,
        "pid_start": holder.pid_start,
        "machine": holder.machine,
        "time": round(time.time(), 3),
        "checkpoints": committed_checkpoints(run.checkpoints),
    }
    write_json(folder.start, start)
    told = ("attempt", "job_id", "nodes", "restart_count")
    keeper.events.write("attempt_start", **{key: start[key] for key in told})
    return folder


def _next_folder(run: RunDir) -> AttemptDir:
    number = max(run.attempt_numbers(), default=-1) + 1
    while True:
        folder = run.attempt(number)
        try:
            folder.path.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def _job_name(env: Mapping[str, str]) -> str | None:
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")


def _nodes(env: Mapping[str, str], host: str, in_slurm: bool) -> list[str]:
    names = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    return expand(names) if in_slurm and names else [host]


def write_end(run: RunDir, folder: AttemptDir, events: EventLog, decision: Decision, extra: Mapping[str, Any]) -> None:
    """Record the end of an attempt, in its folder and as an event."""
    write_json(
        folder.end,
        {
            "attempt": folder.number,
            "cause": decision.cause,
            "decision": decision.action,
            "reason": decision.reason,
            "time": round(time.time(), 3),
            "config_digest": config_digest(run),
            **extra,
        },
    )
    events.write(
        "attempt_end",
        attempt=folder.number,
        cause=decision.cause,
        decision=decision.action,
        reason=decision.reason,
    )


def close_lost_attempts(run: RunDir, events: EventLog) -> None:
    """Give an end to earlier attempts that vanished without one; only the holder of the run's lock may do so."""
    attempts = read_attempts(run)
    for index, attempt in enumerate(attempts):
        if attempt.end is not None:
            continue
        folder = run.attempt(attempt.number)
        later = attempts[index + 1].start.get("checkpoints") if index + 1 < len(attempts) else None
        after = later if isinstance(later, dict) else committed_checkpoints(run.checkpoints)
        before = attempt.start.get("checkpoints") or {}
        decision = lost(attempt, folder)
        extra = {"progressed": bool(after.items() - before.items()), "checkpoints": sorted(after), "exit_codes": {}}
        write_end(run, folder, events, decision, extra)


def lost(attempt: Attempt, folder: AttemptDir) -> Decision:
    """The likely end of an attempt whose keeper could not record it."""
    records = read_records(folder)
    world = attempt.start.get("world_size")
    if records and len(records) == world and all(record.cause == "finished" for record in records.values()):
        return Decision("finished", "finish", "the run is finished (found by a later attempt)")
    failure = first_failure(records.values())
    if failure is not None and failure.cause == "user_error":
        return Decision("user_error", "stop", f"rank {failure.rank} on {failure.host}: {failure.error}")
    named = [cause for cause in log_causes(folder) if cause != "cancelled"]
    if named:
        return Decision(
            named[-1], "restart", "the keeper was killed before it could record the end; " + _LIKELY[named[-1]]
        )
    if failure is not None:
        why = f"rank {failure.rank} on {failure.host} failed: {failure.error}"
    elif attempt.start.get("machine") == machine_identity():
        why = "keeper and ranks were killed (SIGKILL or out of memory?)"
    else:
        host = attempt.start.get("host", "its node")
        why = f"{host} went down, was cut off, or killed keeper and ranks"
    return Decision("lost", "restart", f"the attempt vanished without a word; likely {why}")


_LIKELY = {
    "preempted": "Slurm's log line says: preempted",
    "time_limit": "Slurm's log line says: time limit",
    "requeued": "Slurm's log line says: requeued",
    "node_failure": "Slurm's log line says: a node failed",
}


def log_causes(folder: AttemptDir) -> list[str]:
    """Causes that Slurm's own lines at the ends of the ranks' logs name."""
    causes: list[str] = []
    for path in sorted(folder.path.glob("*.log")):
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
            causes += causes_in_log(file.read().decode(errors="replace"))
    return causes
