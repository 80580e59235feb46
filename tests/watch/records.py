"""Run folders as the keeper and the ranks leave them, written by the real writers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dthpc.attempt.plan import LaunchPlan
from dthpc.monitor.events import EventLog
from dthpc.resilience.outcome import RankRecord
from dthpc.rundir import RunDir, write_json

DEAD_PID = 2**22 + 1
"""Higher than any process id of Linux."""


class Records:
    """Writes the records of one run, step by step, as a test tells the story."""

    def __init__(self, root: Path, name: str = "demo", kind: str = "local") -> None:
        self.run = RunDir(root / name)
        self.run.path.mkdir(parents=True)
        self.kind = kind
        plan = LaunchPlan(
            kind=kind,
            nodes=1,
            max_nodes=1,
            tasks_per_node=2,
            cpus_per_task=1,
            threads_per_rank=1,
            gpus_per_node=0,
            rank_command=["true"],
            keeper_command=["true"],
        )
        plan.write(self.run)
        self.events = EventLog(self.run.events)
        self.number = -1
        self.job_id: str | None = None
        self.pid = DEAD_PID

    def submit(self, job_id: str | None = None, pid: int | None = None) -> Records:
        """As the door does: a Slurm job, or else the process of a keeper, which is dead unless told otherwise."""
        self.job_id, self.pid = job_id, pid or DEAD_PID
        self.events.write("run_submitted", job_id=job_id or str(self.pid), launcher=self.kind)
        return self

    def start(self, total: int = 200, resumed_from: int | None = None, ago: float = 60.0) -> Records:
        self.number += 1
        start = {
            "job_id": self.job_id,
            "pid": self.pid,
            "restart_count": self.number,
            "nodes": ["n1"],
            "time": time.time() - ago,
        }
        write_json(self.run.attempt(self.number).start, start)
        shown = {"job_id": self.job_id, "nodes": ["n1"], "restart_count": self.number}
        self.write("attempt_start", **shown)
        self.write("ranks_ready", world_size=2, rendezvous="n1:2000")
        self.write("train_start", step=resumed_from or 0, total_steps=total, params=800_000, resumed_from=resumed_from)
        return self

    def steps(self, first: int, last: int, every: int = 10) -> Records:
        for step in range(first, last + 1, every):
            self.write("step", step=step, loss=100 / step, step_time=0.4, tokens_per_s=20_000.0, samples=16 * step)
        return self

    def end(self, cause: str, decision: str, reason: str, progressed: bool = False) -> Records:
        fields = {"cause": cause, "decision": decision, "reason": reason}
        self.write("attempt_end", **fields)
        end = {**fields, "progressed": progressed, "time": time.time()}
        write_json(self.run.attempt(self.number).end, end)
        return self

    def fail(self, rank: int, error: str, at: float, log: str = "") -> Records:
        attempt = self.run.attempt(self.number)
        RankRecord(rank, "crash", error=error, step=120, time=at, host="n1").write(attempt)
        attempt.rank_log(rank).write_text(log)
        return self

    def write(self, kind: str, **fields: Any) -> Records:
        self.events.write(kind, attempt=self.number, **fields)
        return self
