"""Acts on a decision: asks Slurm to queue the job again, or submits its continuation."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.processes import CHAIN_VARIABLE
from dthpc.errors import UserError
from dthpc.resilience.decide import SchedulerState
from dthpc.rundir import RunDir
from dthpc.slurm.client import SlurmClient, SlurmError
from dthpc.slurm.environment import scrub
from dthpc.slurm.hostlist import compress
from dthpc.slurm.records import JobRecord, parse_jobs

_TIMEOUT_S = 5.0
_PATIENCE_S = 8.0
"""The job is being killed while these questions are asked: better no answer than a late one."""

_ALREADY = re.compile(r"pending execution", re.IGNORECASE)
_FORBIDDEN = re.compile(r"presently disabled|Only batch jobs", re.IGNORECASE)


class RequeueForbidden(Exception):
    """Slurm will not requeue this job, now or later; a continuation may still be submitted."""


def make_client(env: Mapping[str, str]) -> SlurmClient:
    """A client that gives up soon enough for a job that is being killed."""
    return SlurmClient(timeout_s=_TIMEOUT_S, patience_s=_PATIENCE_S, environment=env)


def job_name(env: Mapping[str, str]) -> str | None:
    """The job as `scontrol` must be told it, or `None` outside Slurm.

    The last task of an array has the array's own id as its SLURM_JOB_ID, so that name would mean all tasks.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return env.get("SLURM_JOB_ID")


def restart_count(env: Mapping[str, str]) -> int:
    """How often Slurm has restarted this job; the variable is absent at the first start."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def scheduler_state(client: SlurmClient, env: Mapping[str, str]) -> SchedulerState | None:
    """What Slurm says of the job now; `None` outside Slurm, or where it does not answer in time."""
    name = job_name(env)
    if name is None:
        return None
    # Only the controller is asked: neither the queue nor accounting knows of a preemption that is under way.
    answer = client.query(["scontrol", "--oneliner", "show", "job", name])
    if answer.code != 0:
        return None
    try:
        return to_state(parse_jobs(answer.output)[0], restart_count(env), time.time())
    except UserError:
        return None


def to_state(record: JobRecord, restarts: int, now: float) -> SchedulerState:
    """What of Slurm's record matters for a decision.

    Args:
        record: the job.
        restarts: how often it had been restarted when this attempt began.
        now: Unix seconds.
    """
    return SchedulerState(
        running=record.state == "RUNNING",
        requeued=(record.restarts or 0) > restarts,
        preempted=record.fields.get("PreemptTime", "None") not in ("None", "Unknown", ""),
        timed_out=record.reason == "TimeLimit" or record.state == "TIMEOUT",
        seconds_left=_seconds_until(record.end_time, now),
    )


def _seconds_until(text: str | None, now: float) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp() - now
    except ValueError:
        return None


def job_ended(client: SlurmClient, job_id: str) -> bool | None:
    """Whether a job is over for good; `None` where Slurm does not say."""
    try:
        record = client.job(job_id)
    except SlurmError:
        return None
    return True if record is None else record.ended


def requeue(client: SlurmClient, env: Mapping[str, str]) -> None:
    """Ask Slurm to queue this job again. Nothing after this call may matter: Slurm begins to kill the job.

    Raises:
        RequeueForbidden: the site or the job's options do not allow it.
        SlurmError: Slurm refused for another reason, or did not answer.
    """
    command = ["scontrol", "requeue", str(job_name(env))]
    answer = client.request(command)
    if answer.code == 0 or _ALREADY.search(answer.said):
        return
    if _FORBIDDEN.search(answer.said):
        raise RequeueForbidden(answer.said)
    raise SlurmError(command, answer.said, "Slurm did not requeue the job")


def resubmit(
    client: SlurmClient,
    run: RunDir,
    plan: LaunchPlan,
    env: Mapping[str, str],
    chain: str,
    avoided: Sequence[str] = (),
) -> str:
    """Submit the continuation of this job, to start when this one has ended.

    Args:
        client: asks Slurm.
        run: the run.
        plan: its launch plan.
        env: the keeper's environment.
        chain: what the attempts of one command share.
        avoided: nodes that it must not get, in the place of those that the script excludes.

    Returns:
        The id of the new job.

    Raises:
        SlurmError: there is no script to submit, or Slurm refused it.
    """
    if plan.batch_script is None:
        raise SlurmError(["sbatch"], "", "the run's launch plan holds no batch script to submit again")
    script = run.submissions / f"continuation-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    script.write_text(plan.batch_script, encoding="utf-8")
    command = ["sbatch", "--parsable", f"--dependency=afterany:{env['SLURM_JOB_ID']}", str(script)]
    if avoided:
        command.insert(1, f"--exclude={compress(avoided)}")
    folder = env.get("SLURM_SUBMIT_DIR")
    if folder:
        command.insert(1, f"--chdir={folder}")
    outside = {**scrub(env), CHAIN_VARIABLE: chain}
    answer = SlurmClient(_TIMEOUT_S, _PATIENCE_S, environment=outside).request(command)
    if answer.code != 0:
        raise SlurmError(command, answer.said, "the continuation could not be submitted")
    return answer.output.strip().split(";")[0]
