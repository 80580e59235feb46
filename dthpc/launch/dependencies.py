"""What `cluster.after` means to Slurm: jobs that must have ended well before this one starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dthpc.errors import UserError
from dthpc.rundir import RunDir, read_json
from dthpc.slurm.client import SlurmClient

_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)


def dependency_text(cfg: Any) -> str | None:
    """The value of sbatch's `--dependency`, or `None`.

    Jobs of `cluster.after` become `afterok`. A job that is requeued keeps its id, so `afterok` waits for the run's last
    attempt. When it fails, the condition can never hold: the submission also asks Slurm to cancel the waiting job then,
    which would otherwise wait for ever.

    Raises:
        UserError: a run is unknown, was never submitted to Slurm, or has already failed.
    """
    found = [job_id for word in cfg.cluster.after if (job_id := _job_of(str(word), Path(cfg.run.root))) is not None]
    words = [f"afterok:{':'.join(dict.fromkeys(found))}"] if found else []
    if cfg.cluster.dependency:
        words.append(str(cfg.cluster.dependency))
    if len(words) == 2 and "?" in words[1]:
        raise UserError(
            "joins its conditions with ?, which Slurm cannot mix with those of cluster.after",
            key="cluster.dependency",
            value=words[1],
            instead="write the job ids of cluster.after into cluster.dependency",
        )
    return ",".join(words) or None


def unknown_jobs(cfg: Any, client: SlurmClient) -> list[UserError]:
    """Job ids in `cluster.after` that Slurm does not know: it would cancel a job that waits for them."""
    given = [str(word) for word in cfg.cluster.after if _JOB_ID.fullmatch(str(word))]
    known = client.jobs(given)
    why = "Slurm knows no such job, or no longer"
    instead = "the id of a job that waits or runs, or the name of a run"
    return [UserError(why, key="cluster.after", value=word, instead=instead) for word in given if word not in known]


def _job_of(word: str, root: Path) -> str | None:
    """The job to wait for; `None` where the run has already ended well."""
    if _JOB_ID.fullmatch(word):
        return word
    folder = next((path for path in (root / word, Path(word)) if (path / "launch.json").is_file()), None)
    if folder is None:
        raise UserError(
            f"no run of this name under {root}, no folder of a run and no job id",
            key="cluster.after",
            value=word,
            instead="name a run that `python -m dthpc.status` lists, or a Slurm job id",
        )
    return _job_of_run(word, RunDir(folder))


def _job_of_run(word: str, run: RunDir) -> str | None:
    # Only here: a submission without dependencies need not load what reads a run's records.
    from dthpc.watch.survey import survey

    report = survey([run], None)[0]
    if report.state == "finished":
        return None
    if report.state in ("failed", "cancelled", "stopped"):
        why = f"the run has ended without finishing ({report.state}: {report.why}), so that this one would never start"
        raise UserError(why, key="cluster.after", value=word, instead="resume that run first, or leave it out")
    plan = read_json(run.launch)
    if not isinstance(plan, dict) or plan.get("kind") != "slurm" or report.job_id is None:
        why = "the run has no Slurm job, and Slurm can wait for jobs alone"
        raise UserError(why, key="cluster.after", value=word, instead="submit that run with +cluster=slurm first")
    if plan.get("requeue") == "resubmit":
        why = "the run goes on in a new job after each attempt, so that its present job says nothing of its end"
        raise UserError(why, key="cluster.after", value=word, instead="submit that run with cluster.requeue=requeue")
    return report.job_id
