"""One training run under trial: submitted by the real command, held at known steps, interrupted, compared."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from dthpc.checkpoint.manifest import latest_verified
from dthpc.monitor.events import read_events
from dthpc.rundir import RunDir, read_json
from tests.attempt.runs import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 12
PATIENCE_S = 400.0

TINY = [
    f"train.steps={STEPS}",
    "train.seq_len=32",
    "train.global_batch=8",
    "train.eval_every=-1",
    "model.dim=32",
    "model.layers=1",
    "model.heads=2",
    "model.hidden=64",
    "data=text",
    "optim.schedule.warmup_steps=2",
    "monitor.tensorboard=false",
    "monitor.log_every=1",
    "checkpoint.every=0",
    "checkpoint.keep=0",
    "follow=false",
    "json=true",
]


def write_text(folder: Path) -> Path:
    """Some text to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        lines = [f"line {line} of text {number}: {line * line % 97} apples\n" for line in range(400)]
        (folder / f"text-{number}.txt").write_text("".join(lines))
    return folder


class Trial:
    """A run and what the test does to it."""

    def __init__(
        self, root: Path, name: str, *overrides: str, gates: tuple[int, ...] = (), cluster: Any = None
    ) -> None:
        self.root = root
        self.run = RunDir(root / "runs" / name)
        self.cluster = cluster
        self.job = ""
        text, cache = root / "text", root / "cache"
        self.words = [
            *TINY,
            f"run.root={root / 'runs'}",
            f"run.name={name}",
            f"data.source.path={text}",
            f"data.cache_dir={cache}",
            *overrides,
        ]
        if gates:
            at = ",".join(map(str, gates))
            self.words += ["+callbacks.gate._target_=tests.integration.gate.Gate", f"+callbacks.gate.at=[{at}]"]

    # --- what the test does -----------------------------------------------------------------------------------------

    def submit(self, *more: str) -> Trial:
        """Type the command; the job id, or the keeper's process id, is kept."""
        told = submit([*self.words, *more], self.cluster)
        self.job = told["runs"][0]["job_id"]
        return self

    def held(self, step: int, ranks: int = 2) -> Trial:
        """Wait until all ranks are held at a step."""
        for rank in range(ranks):
            wait_for((self.run.path / f"held-{step}-{rank}").exists, PATIENCE_S)
        return self

    def open(self, step: int) -> Trial:
        """Let the run go on from a step."""
        (self.run.path / f"open-{step}").touch()
        return self

    def end(self, attempt: int) -> dict[str, Any]:
        """Wait for the end of an attempt."""
        found = wait_for(lambda: read_json(self.run.attempt(attempt).end), PATIENCE_S)
        assert isinstance(found, dict)
        return found

    def release(self) -> Trial:
        """Start the requeued job now instead of in two minutes.

        A step's manager that ends late would take the socket of the next attempt's step of that name (pmi2) with it, so
        all must have gone; after two minutes they have.
        """
        self.requeued()
        wait_for(lambda: not _managed(self.job))
        self.cluster.release(self.job)
        return self

    def requeued(self) -> Trial:
        """Wait until the job is queued again, and may be started.

        A slurmd refuses a start in the same second as the kill before ("already killed, do not launch batch job"): it
        takes it for one that was on its way. The two minutes that are skipped here make sure of that otherwise.
        """
        self.cluster.wait_job(self.job, "PENDING", seconds=PATIENCE_S)
        killed = datetime.fromisoformat(self.cluster.job(self.job)["SubmitTime"]).timestamp()
        wait_for(lambda: time.time() > killed + 2)
        return self

    def done(self, state: str = "COMPLETED") -> Trial:
        """Wait until Slurm's job is over."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        found = self.cluster.wait_job(self.job, *final, seconds=PATIENCE_S)
        assert found == state, self.keeper_log()
        return self

    def continuation(self) -> str | None:
        """The job that the keeper submitted to go on in, once there is one."""
        events, _ = read_events(self.run.events)
        jobs = [event["job_id"] for event in events if event.get("launcher") == "continuation"]
        return jobs[-1] if jobs else None

    # --- what the test looks at -------------------------------------------------------------------------------------

    def ends(self) -> list[tuple[str, str]]:
        """Cause and decision of each attempt."""
        ends = [read_json(self.run.attempt(number).end) or {} for number in self.run.attempt_numbers()]
        return [(end.get("cause", ""), end.get("decision", "")) for end in ends]

    def start(self, attempt: int) -> dict[str, Any]:
        """What an attempt started with."""
        found = read_json(self.run.attempt(attempt).start)
        assert isinstance(found, dict)
        return found

    def losses(self) -> dict[int, float]:
        """Training loss of each step, as the events tell it."""
        events, _ = read_events(self.run.events)
        return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}

    def keeper_log(self) -> str:
        """Everything that the keepers said."""
        return "".join(path.read_text() for path in sorted(self.run.submissions.glob("*.log")))

    def bits(self) -> dict[str, bytes]:
        """The bits of all that the final checkpoint holds: parameters and optimizer state, by name."""
        newest, rejected = latest_verified(self.run.checkpoints, quick=False)
        assert newest is not None
        assert (newest.step, rejected) == (STEPS, [])
        return checkpoint_bits(newest.path)


def submit(words: list[str], cluster: Any = None) -> dict[str, Any]:
    """What the door says, as JSON."""
    command = [sys.executable, "-m", "dthpc.submit", *(["+cluster=slurm"] if cluster else []), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if cluster:
        done = cluster.run(command, cwd=REPOSITORY, env=environment)
    else:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def checkpoint_bits(path: Path) -> dict[str, bytes]:
    """The bits of every tensor of a checkpoint, whatever files they lie in: parameters, optimizer, random numbers."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def _managed(job: str) -> bool:
    """Whether some node still has a manager of one of a job's steps."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if line.read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                return True
    return False
