"""Submits runs to Slurm through submitit.

submitit writes the batch script, calls sbatch and hands out job objects. What is left aside are its pickles: the script
does not call back a pickled function but `exec`s dthpc's keeper with the run's folder, because every attempt after the
first (a requeue, a node failure, a continuation) must start from what is on disk, and a pickle holds the state of the
first submission.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm import slurm as submitit_slurm

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.launch.containers import package_folder
from dthpc.launch.refusals import explain_refusal
from dthpc.launch.sbatch import file_pattern
from dthpc.launch.site import Site
from dthpc.rundir import RunDir, write_json
from dthpc.slurm.client import Answer, SlurmClient
from dthpc.slurm.environment import leaked

SUBMIT_TIMEOUT_S = 120
"""Seconds after which an sbatch that does not return is given up, and the queue is searched for its job."""


class SlurmJob(submitit_slurm.SlurmJob[Any]):
    """A submitted run: its `job_id`, `state`, `done()` and `cancel()`. No result comes back through it."""

    def _register_in_watcher(self) -> None:
        # submitit's watcher polls sacct, which sites without accounting do not have.
        return

    @property
    def state(self) -> str:
        """Slurm's state of the job, from the controller, the queue or accounting; `UNKNOWN` where none knows it."""
        record = SlurmClient().job(self.job_id)
        return record.state if record else "UNKNOWN"

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is in a final state, or Slurm no longer knows it."""
        record = SlurmClient().job(self.job_id)
        return record is None or record.ended

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; one that has ended already is no error."""
        SlurmClient().cancel(self.job_id)


class SlurmExecutor(submitit_slurm.SlurmExecutor):
    """Submits the batch script of a launch plan; several runs with the same demands become one job array."""

    job_class = SlurmJob

    def __init__(self, site: Site | None = None, client: SlurmClient | None = None) -> None:
        """Make an executor.

        Args:
            site: the site, whose partitions are named in messages.
            client: runs Slurm's commands.

        Raises:
            UserError: Slurm's commands are absent.
        """
        self.client = client or SlurmClient()
        self.client.require("sbatch", "srun", "scontrol")
        self.site = site
        super().__init__(folder=".")

    def launch(self, plans: Sequence[tuple[RunDir, LaunchPlan]]) -> list[SlurmJob]:
        """Submit runs, whose plans are stored already; the jobs come in the order of the plans.

        Raises:
            UserError: sbatch refuses; nothing of this call stays submitted, and no script of it stays behind.
        """
        jobs: dict[int, SlurmJob] = {}
        try:
            for group in _alike(plans):
                members = [plans[index] for index in group]
                found = [self._launch_one(*members[0])] if len(members) == 1 else self._launch_array(members)
                jobs.update(zip(group, found, strict=True))
        except BaseException:
            for job_id in {job.job_id.split("_")[0] for job in jobs.values()}:
                self.client.cancel(job_id)
            raise
        return [jobs[index] for index in range(len(plans))]

    def _launch_one(self, run: RunDir, plan: LaunchPlan) -> SlurmJob:
        self.folder = run.submissions
        self.parameters = script_parameters(plan)
        return self._submit(run_command(run, plan))

    def _launch_array(self, members: list[tuple[RunDir, LaunchPlan]]) -> list[SlurmJob]:
        """One job array, whose tasks find their run in an index file by `SLURM_ARRAY_TASK_ID`."""
        first, plan = members[0]
        self._check_array_size(len(members))
        self.folder = first.path.parent / ".sweeps" / f"{first.name}-{uuid.uuid4().hex[:8]}"
        index = self.folder / "index.json"
        write_json(index, {"runs": [str(run.path) for run, _ in members]})
        parameters = script_parameters(plan)
        parameters["additional_parameters"]["output"] = file_pattern(self.folder, "%A_%a.log")
        self.parameters = {
            **parameters,
            "map_count": len(members),
            "array_parallelism": plan.site.get("array_parallelism", 256),
        }
        words = [*plan.keeper_command, "--sweep", str(index)]
        try:
            job = self._submit(f"exec {shlex.join(words)}")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return [SlurmJob(self.folder, f"{job.job_id}_{task}") for task in range(len(members))]

    def _check_array_size(self, count: int) -> None:
        if self.site is not None and count > self.site.max_array_size - 1:
            raise UserError(
                f"a sweep of {count} runs is more than a job array may have here (MaxArraySize="
                f"{self.site.max_array_size})",
                key="--multirun",
                instead="split the sweep",
            )

    def _submit(self, command: str) -> SlurmJob:
        """Submit through submitit: again while the controller is away; a slow sbatch that got through is found."""
        self.folder.mkdir(parents=True, exist_ok=True)
        submitted: list[Any] = []

        def once() -> Answer:
            # submitit prints what sbatch said and raises it too: once is enough.
            with contextlib.redirect_stderr(io.StringIO()):
                try:
                    submitted.append(self._submit_command(command))
                except FailedJobError as error:
                    code = getattr(error.__cause__, "returncode", 1)
                    return Answer(code, "", str(error) or f"Socket timed out: no answer within {SUBMIT_TIMEOUT_S} s")
                except FailedSubmissionError as error:
                    return Answer(1, "", str(error))
            return Answer(0, submitted[-1].job_id, "")

        answer = self.client.repeat(once, lambda tried: tried.unreached)
        scripts = [path for path in self.folder.glob(".submission_file_*.sh") if not path.is_symlink()]
        if not submitted and answer.temporary:
            submitted += [SlurmJob(self.folder, job_id) for job_id in self._jobs_of_scripts(scripts)]
        for path in scripts:
            path.unlink()
        if not submitted:
            with contextlib.suppress(OSError):  # other submissions of the run lie there
                self.folder.rmdir()
            raise explain_refusal(answer.errors, self.parameters["additional_parameters"], self.site)
        job: SlurmJob = submitted[0]
        return job

    def _jobs_of_scripts(self, scripts: list[Path]) -> list[str]:
        """Ids of the jobs that came of scripts whose sbatch did not live to tell."""
        command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%F|%o"]
        rows = (line.split("|", 1) for line in self.client.ask(command).splitlines())
        return [row[0] for row in rows if len(row) == 2 and row[1].strip() in {str(path) for path in scripts}]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return _script(command, self.folder, self.parameters)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # What an outer job left in the environment would be taken for options, and reach the new job.
        unset = [word for name in leaked(os.environ) for word in ("-u", name)]
        return ["env", *unset, "timeout", str(SUBMIT_TIMEOUT_S), "sbatch", str(submission_file_path)]

    def _num_tasks(self) -> int:
        # The ranks are tasks of the keeper's srun, and no business of submitit's.
        return 1


def batch_script(run: RunDir, plan: LaunchPlan) -> str:
    """The batch script of a run, to the byte what `SlurmExecutor.launch` submits for it alone."""
    return _script(run_command(run, plan), run.submissions, script_parameters(plan))


def run_command(run: RunDir, plan: LaunchPlan) -> str:
    """The batch script's command: the shell becomes the keeper, so that Slurm's signals reach it."""
    return f"exec {shlex.join([*plan.keeper_command, str(run.path)])}"


def script_parameters(plan: LaunchPlan) -> dict[str, Any]:
    """submitit's parameters for a plan."""
    options = {name.replace("-", "_"): value for name, value in plan.site["sbatch"].items()}
    return {
        "setup": [*plan.site["setup"], *_import_path()],
        "stderr_to_stdout": True,
        "use_srun": False,
        # submitit's default is a name of its own, which sites that account by such keys refuse.
        "wckey": None,
        "additional_parameters": options,
    }


def _script(command: str, folder: Path, parameters: dict[str, Any]) -> str:
    text: str = submitit_slurm._make_sbatch_string(command=command, folder=folder, **parameters)
    return text


def _import_path() -> list[str]:
    """Lets the keeper find dthpc where it is not installed, from whatever folder the command was typed."""
    parent = package_folder().parent
    if parent.name in ("site-packages", "dist-packages"):
        return []
    return [f'export PYTHONPATH={shlex.quote(str(parent))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


def _alike(plans: Sequence[tuple[RunDir, LaunchPlan]]) -> list[list[int]]:
    """Positions of the plans that may share one job array: those that differ only in what is a run's own."""
    groups: dict[str, list[int]] = {}
    for index, (_, plan) in enumerate(plans):
        shared = {name: value for name, value in plan.site["sbatch"].items() if name not in ("job-name", "output")}
        key = repr((sorted(shared.items()), plan.site["setup"], plan.keeper_command))
        groups.setdefault(key, []).append(index)
    return list(groups.values())
