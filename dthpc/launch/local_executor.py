"""Starts runs on this machine: the local counterpart of the Slurm executor, with the same interface."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.local.local import LocalJob

from dthpc.attempt.lock import ensure_free
from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.rundir import RunDir


class LocalExecutor(submitit.LocalExecutor):
    """Starts a keeper for a run, as a process of its own that survives the terminal.

    submitit's own local executor runs a pickled function under a controller that ends after a fixed time. Here the
    state of a run comes from its folder alone, so the keeper takes the controller's place, and the job object, its id,
    its state and its `cancel()` stay submitit's.
    """

    def __init__(self, folder: str | Path) -> None:
        """Use a folder for the records of submissions, as every submitit executor does."""
        super().__init__(folder=folder)

    def launch(self, launches: Sequence[tuple[RunDir, LaunchPlan]]) -> list[submitit.Job[Any]]:
        """Start runs: one at once, several one after another, since they would share this machine's cores.

        The plans must already lie in the runs' folders. `job.cancel()` asks a run to save and stop.

        Returns:
            One job for each run; those of a sweep share one process.

        Raises:
            UserError: one of the runs is already running, or a folder can't be written; nothing has been started then.
        """
        for run, _ in launches:
            ensure_free(run)
        if not launches:
            return []
        run, plan = launches[0]
        if len(launches) == 1:
            arguments = [str(run.path)]
        else:
            sweep = run.submissions / "sweep.json"
            _write(sweep, json.dumps({"runs": [str(other.path) for other, _ in launches]}, indent=2) + "\n")
            arguments = ["--sweep", str(sweep)]
        process = self._start([*plan.keeper_command, *arguments], run)
        return [self._job(other, process) for other, _ in launches]

    def _start(self, command: list[str], run: RunDir) -> subprocess.Popen[bytes]:
        log = run.submissions / "keeper.log"
        _write(log, "", mode="a")
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _job(self, run: RunDir, process: subprocess.Popen[bytes]) -> LocalJob[Any]:
        return LocalJob(folder=run.submissions, job_id=str(process.pid), process=process)


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(
            f"can't be written: {error.strerror}",
            key="run.root",
            value=path.parent,
            instead="a folder that you may write",
        ) from error
