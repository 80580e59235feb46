"""`dthpc status` and the follower on a real Slurm: every state that only Slurm can bring about.

The runs are submitted by the real door and kept by the real keeper; only the ranks do not train.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

FAKE_RANK = Path(__file__).parent.parent / "watch" / "fake_rank.py"

PYTHON = f"""#!/bin/bash
case "$*" in
*dthpc.attempt.rank*) exec {sys.executable} {FAKE_RANK} "${{@: -1}}" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


class Site:
    """A user on the login host of a real Slurm."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.jobs: list[str] = []
        self.watches: list[Watch] = []

    def submit(self, name: str, story: dict[str, Any], *words: str) -> str:
        """Submit a run by the real door; returns the job's id."""
        run = self.folder / "runs" / name
        (run / "attempts").mkdir(parents=True)
        (run / "story.json").write_text(json.dumps(story))
        command = [
            *(sys.executable, "-m", "dthpc.submit", "+cluster=slurm", f"run.name={name}", "json=true"),
            *(f"cluster.python={self.python}", "cluster.nodes=2", "cluster.tasks_per_node=1", *words),
        ]
        done = self.cluster.run(command, cwd=self.folder)
        assert done.returncode == 0, done.stderr + done.stdout
        self.jobs.append(json.loads(done.stdout)["runs"][0]["job_id"])
        return self.jobs[-1]

    def status(self, name: str, path: str | None = None) -> dict[str, Any]:
        """What status tells of one run; with a search path of its own, if one is given."""
        command = ["env", f"PATH={path or os.environ['PATH']}", sys.executable, "-m", "dthpc.status", name, "--json"]
        done = self.cluster.run(command, cwd=self.folder)
        assert done.returncode in (0, 1), done.stderr
        run: dict[str, Any] = json.loads(done.stdout)["runs"][0]
        return run

    def watch(self, name: str) -> Watch:
        """Follow a run in the background."""
        command = [sys.executable, "-u", "-m", "dthpc.status", name, "--watch"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.watches.append(Watch(self.cluster.popen(command, cwd=self.folder, **options)))
        return self.watches[-1]


class Watch:
    """A follower, and what it has shown."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.news = threading.Condition()
        self.ended = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.lines.append(line.rstrip())
                self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def wait_for(self, words: str, seconds: float = 90.0) -> None:
        """Wait until a line holds some words."""
        with self.news:
            self.news.wait_for(lambda: self.ended or any(words in line for line in self.lines), seconds)
            assert any(words in line for line in self.lines), f"{words!r} did not come in {self.lines}"

    def end(self) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(120)
        self.reader.join()
        return code


@pytest.fixture
def site(minicluster: Any, tmp_path: Path) -> Iterator[Site]:
    found = Site(minicluster, tmp_path)
    yield found
    for watch in found.watches:
        watch.process.kill()
        watch.process.wait()
    for job in found.jobs:
        minicluster.run(["scancel", job])


def test_a_held_job_is_held_and_then_runs_to_its_end(site: Site) -> None:
    job = site.submit("demo", {"steps": 20}, "+cluster.sbatch.hold=true")
    held = site.status("demo")
    assert (held["state"], held["job_id"], held["job_state"]) == ("held", job, "PENDING")
    assert f"scontrol release {job}" in held["why"]
    watch = site.watch("demo")
    watch.wait_for("held: held in the queue (JobHeldUser)")
    site.cluster.output("scontrol", "release", job)
    assert watch.end() == 0, watch.lines
    assert any(line.startswith("finished") and "step 20/20" in line for line in watch.lines)
    after = site.status("demo")
    assert (after["state"], after["step"], after["conflict"]) == ("finished", 20, None)
    assert len(after["attempts"][0]["nodes"]) == 2


def test_a_preemption_is_followed_into_the_next_attempt(site: Site) -> None:
    job = site.submit("demo", {"steps": 20, "hang_at": 5}, "cluster.partition=grace")
    watch = site.watch("demo")
    watch.wait_for("step 1/20")
    running = site.status("demo")
    assert (running["state"], running["job_state"]) == ("running", "RUNNING")
    site.cluster.preempt(job)
    watch.wait_for("waiting for the restart")
    watch.wait_for("requeued: ")
    waiting = site.status("demo")
    assert waiting["state"] == "requeued"
    assert "attempt 0 ended: preempted" in waiting["why"]
    site.cluster.release(job)
    assert watch.end() == 0, watch.lines
    after = site.status("demo")
    assert [attempt["cause"] for attempt in after["attempts"]] == ["preempted", "finished"]


def test_a_cancelled_job_is_cancelled(site: Site) -> None:
    job = site.submit("demo", {"steps": 20, "hang_at": 5})
    watch = site.watch("demo")
    watch.wait_for("step 1/20")
    site.cluster.output("scancel", job)
    assert watch.end() == 130, watch.lines
    assert site.status("demo")["state"] == "cancelled"


def test_a_job_cancelled_in_the_queue_is_cancelled(site: Site) -> None:
    job = site.submit("demo", {"steps": 20}, "+cluster.sbatch.hold=true")
    site.cluster.output("scancel", job)
    site.cluster.wait_job(job, "CANCELLED")
    assert site.status("demo")["state"] == "cancelled"


def test_a_crash_tells_the_first_failing_rank(site: Site) -> None:
    site.submit("demo", {"steps": 20, "fail_at": 5}, "resilience.restart_on_failure=false")
    watch = site.watch("demo")
    assert watch.end() == 1, watch.lines
    report = site.status("demo")
    assert report["state"] == "failed"
    assert "ValueError: the data has a hole" in report["why"]
    assert (report["failure"]["rank"], report["failure"]["step"]) == (1, 5)
    assert "rank 1 is about to fail at step 5" in report["failure"]["log_tail"]
    assert any("rank 1 is about to fail" in line for line in watch.lines)


def test_a_job_that_slurm_does_not_know_is_lost(site: Site) -> None:
    site.submit("demo", {"steps": 20, "hang_at": 5})
    site.watch("demo").wait_for("step 1/20")
    events = site.folder / "runs/demo/events.jsonl"
    moved = site.folder / "runs/other"
    (moved / "attempts/0").mkdir(parents=True)
    (moved / "launch.json").write_text((site.folder / "runs/demo/launch.json").read_text())
    for path in (events, site.folder / "runs/demo/attempts/0/attempt.json"):
        text = path.read_text().replace(f'"{site.jobs[-1]}"', '"999999"')
        (moved / path.relative_to(site.folder / "runs/demo")).write_text(text)
    report = site.status("other")
    assert report["state"] == "lost"
    assert "Slurm does not know job 999999" in report["why"]
    assert "records say running" in report["conflict"]


def test_it_works_without_accounting(site: Site, tmp_path: Path) -> None:
    """On a path that has no sacct, as on sites that have none."""
    job = site.submit("demo", {"steps": 20, "hang_at": 5})
    site.watch("demo").wait_for("step 1/20")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("squeue", "scontrol"):
        found = site.cluster.output("which", tool)
        (tools / tool).symlink_to(found)
    report = site.status("demo", path=str(tools))
    assert (report["state"], report["job_id"], report["job_state"]) == ("running", job, "RUNNING")


def test_leaving_the_follower_leaves_the_job(site: Site) -> None:
    job = site.submit("demo", {"steps": 20, "hang_at": 5})
    watch = site.watch("demo")
    watch.wait_for("step 1/20")
    watch.process.send_signal(2)
    assert watch.end() == 130
    assert f"to cancel it: scancel {job}" in watch.lines
    assert site.status("demo")["state"] == "running"


def test_one_query_serves_many_runs(site: Site) -> None:
    for number in range(3):
        site.submit(f"run{number}", {"steps": 20}, "+cluster.sbatch.hold=true")
    done = site.cluster.run([sys.executable, "-m", "dthpc.status"], cwd=site.folder)
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["held", "held", "held"]
