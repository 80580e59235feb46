from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from dthpc.checkpoint.manifest import MANIFEST_NAME, Manifest
from dthpc.errors import UserError
from dthpc.rundir import RunDir
from dthpc.slurm.records import JobRecord
from dthpc.watch.report import STATES, RunReport
from dthpc.watch.survey import Jobs, find_runs, job_ids, last_lines, process_began, survey
from tests.watch.records import DEAD_PID, Records


class Queue:
    """A queue that holds what a test says, and counts how often it is asked."""

    def __init__(self, *jobs: JobRecord) -> None:
        self.held = {job.job_id: job for job in jobs}
        self.queries: list[list[str]] = []

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        wanted = list(job_ids)
        self.queries.append(wanted)
        return {job_id: self.held[job_id] for job_id in wanted if job_id in self.held}

    def job(self, job_id: str) -> JobRecord | None:
        return self.held.get(job_id)


class DeafSlurm(Queue):
    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        raise UserError("Slurm's controller did not answer within 5 s", key="squeue")


def report_of(records: Records, slurm: Jobs | None = None, detail: bool = True) -> RunReport:
    return survey([records.run], slurm, detail=detail)[0]


def test_numbers_come_from_the_events(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().steps(10, 120)
    records.write("eval", step=100, loss=2.5, bits_per_byte=3.3, bigram_bits_per_byte=3.4)
    report = report_of(records.end("stopped", "stop", "asked to stop", progressed=True))
    assert (report.state, report.why) == ("stopped", "asked to stop")
    assert (report.step, report.total_steps, report.loss) == (120, 200, pytest.approx(100 / 120))
    assert (report.eval_step, report.eval_loss, report.bits_per_byte) == (100, 2.5, 3.3)
    assert report.eta_s is None


def test_attempts_come_from_their_folders(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm").submit("7").start().steps(10, 50)
    records.end("preempted", "requeue", "preempted by Slurm", progressed=True).start(resumed_from=50)
    report = report_of(records, Queue(JobRecord("7", "RUNNING", "squeue")))
    assert report.state == "running"
    assert [(attempt.number, attempt.cause, attempt.decision) for attempt in report.attempts] == [
        (0, "preempted", "requeue"),
        (1, None, None),
    ]
    assert report.attempts[0].duration(0.0) == pytest.approx(60, abs=5)


def test_the_first_failure_in_time_is_why_it_failed(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().steps(10, 120)
    records.fail(0, "RuntimeError: connection closed by peer", at=20.0).fail(
        1, "ValueError: loss is nan", at=10.0, log="step 120\x1b[31m\rValueError: \x07loss is nan\n"
    )
    report = report_of(records.end("crash", "stop", "3 attempts in a row ended without a new checkpoint"))
    assert report.state == "failed"
    assert report.why is not None
    assert report.why.startswith("rank 1 on n1: ValueError: loss is nan (3 attempts in a row")
    assert "\n" not in report.why
    assert report.failure is not None
    assert report.failure.log_tail == ["ValueError: loss is nan"]


def test_a_reason_that_names_the_error_is_not_doubled(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().fail(1, "ValueError: x", at=1.0)
    assert report_of(records.end("crash", "stop", "rank 1 on n1 failed: ValueError: x")).why == (
        "rank 1 on n1 failed: ValueError: x"
    )


def test_an_error_of_many_lines_is_told_once_and_on_one(tmp_path: Path) -> None:
    error = "ValueError: the data has a hole\n  shard 3\n  offset 7"
    records = Records(tmp_path).submit().start().fail(1, error, at=1.0)
    report = report_of(records.end("crash", "stop", f"rank 1 on n1 failed: {error}"))
    assert report.why == "rank 1 on n1 failed: ValueError: the data has a hole shard 3 offset 7"


def test_the_step_of_a_run_that_is_over_is_not_older_than_its_checkpoint(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().steps(10, 40)
    folder = records.run.checkpoints / "step-00000045"
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_bytes(Manifest(45, 0, 1, 12.5, {}, {}).encode())
    report = report_of(records.end("stopped", "stop", "asked to stop", progressed=True))
    assert report.checkpoint is not None, report.rejected
    assert (report.step, report.checkpoint.step) == (45, 45)


def test_hundreds_of_runs_cost_one_query_and_the_ended_ones_none(tmp_path: Path) -> None:
    runs = [Records(tmp_path, f"run{n}", "slurm").submit(str(n)).start() for n in range(100)]
    for records in runs[:90]:
        records.end("finished", "finish", "the run is finished")
    queue = Queue(JobRecord("95", "RUNNING", "squeue"))
    reports = survey(find_runs(tmp_path), queue)
    assert len(queue.queries) == 1
    assert sorted(queue.queries[0]) == [str(n) for n in range(90, 100)]
    states = [report.state for report in reports]
    assert (states.count("finished"), states.count("running"), states.count("lost")) == (90, 1, 9)


def test_a_pending_job_tells_its_reason_and_expected_start(tmp_path: Path) -> None:
    queue = Queue(JobRecord("7", "PENDING", "scontrol", reason="Priority", start_time="2026-01-31T12:00:00"))
    report = report_of(Records(tmp_path, kind="slurm").submit("7"), queue)
    assert report.state == "pending"
    assert report.pending is not None
    assert (report.pending.reason, report.pending.start is not None) == ("Priority", True)


def test_a_deaf_slurm_leaves_the_records(tmp_path: Path) -> None:
    report = report_of(Records(tmp_path, kind="slurm").submit("7").start().steps(10, 20), DeafSlurm())
    assert (report.state, report.step) == ("running", 20)
    assert report.conflict == "by its records alone: Slurm's controller did not answer within 5 s"


def test_a_resubmitted_run_is_pending_again(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm").submit("7").start().end("crash", "stop", "it broke").submit("9")
    report = report_of(records, Queue(JobRecord("9", "PENDING", "squeue", reason="Resources")))
    assert (report.state, report.job_id) == ("pending", "9")


def test_any_half_written_file_is_survived(tmp_path: Path) -> None:
    records = Records(tmp_path).submit().start().steps(10, 20)
    attempt = records.run.attempt(0)
    for path in (records.run.launch, attempt.start, attempt.end, attempt.rank_exit(0)):
        path.write_text('{"time": 12')
    with open(records.run.events, "ab") as events:
        events.write(b'{"time":1,"kind":"st')
    (records.run.checkpoints / "step-00000020").mkdir(parents=True)
    report = report_of(records)
    assert (report.state, report.step, report.checkpoint) == ("lost", 20, None)
    assert len(report.rejected) == 1


@pytest.mark.parametrize("content", ["[]", '"x"', '{"nodes": 3, "time": "soon", "cause": 1, "job_id": {}}'])
def test_json_of_another_shape_is_survived(tmp_path: Path, content: str) -> None:
    records = Records(tmp_path).submit().start()
    attempt = records.run.attempt(0)
    for path in (records.run.launch, attempt.start, attempt.end, attempt.rank_exit(0)):
        path.write_text(content)
    assert report_of(records).to_json()["state"] in STATES


def test_an_empty_folder_is_no_run_and_an_absent_root_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    Records(tmp_path, "real")
    assert [run.name for run in find_runs(tmp_path)] == ["real"]
    assert find_runs(tmp_path / "absent") == []


def test_a_root_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="--root"):
        find_runs(tmp_path / "file")


def test_files_of_others_are_told_and_do_not_stop_it(tmp_path: Path) -> None:
    """As another user, since root reads everything."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    closed = Records(tmp_path, "closed").submit().start()
    closed.run.path.chmod(0o700)
    secret = Records(tmp_path, "secret").submit().start()
    secret.run.events.chmod(0o600)
    code = (
        "import os, sys; sys.path[:] = [p or os.getcwd() for p in sys.path]\n"
        "from dthpc.watch.survey import find_runs, survey; from pathlib import Path\n"
        f"os.setuid(65534)\n"
        f"for report in survey(find_runs(Path({str(tmp_path)!r})), None): print(report.name, report.unreadable)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("closed [")
    assert "Permission denied" in first
    assert "events.jsonl: Permission denied" in second


def test_job_ids_hold_every_job_of_a_run(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm").submit("7").start().end("time_limit", "resubmit", "time").submit("8_1")
    assert job_ids(records.run) == {"7", "8_1"}


def test_last_lines_of_a_huge_log_are_found_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)) + "\n\n")
    assert last_lines(log, 2) == ["line 99998", "line 99999"]
    assert last_lines(tmp_path / "absent", 2) == []


def test_a_run_is_reported_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(tmp_path, "demo")
    monkeypatch.chdir(tmp_path)
    assert survey([RunDir(Path("demo"))], None)[0].path == str(tmp_path / "demo")


def test_a_submission_that_is_recorded_after_its_attempt_began_is_not_a_new_one(tmp_path: Path) -> None:
    records = Records(tmp_path, kind="slurm")
    records.job_id = "7"
    records.start().submit("7")
    report = report_of(records, Queue(JobRecord("7", "RUNNING", "squeue")))
    assert (report.state, report.awaits_start) == ("running", False)
    local = Records(tmp_path, "local").start().submit().end("crash", "stop", "it broke")
    assert report_of(local).state == "failed"


def test_a_run_whose_keeper_is_still_to_come_to_it_is_pending(tmp_path: Path) -> None:
    keeper = subprocess.Popen(["sleep", "60"])
    try:
        records = Records(tmp_path).submit(pid=keeper.pid)
        assert report_of(records).state == "pending"
    finally:
        keeper.kill()
        keeper.wait()
    assert report_of(records).state == "lost"


def test_what_a_keeper_said_before_its_first_record_is_why_the_run_is_lost(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.run.launch.unlink()
    records.run.submissions.mkdir()
    log = records.run.submissions / "keeper.log"
    with open(log, "wb") as output:
        command = [sys.executable, "-m", "dthpc.attempt.keeper", str(records.run.path)]
        keeper = subprocess.Popen(command, stdout=output, stderr=output)
    records.submit(pid=keeper.pid)
    keeper.wait()
    report = report_of(records)
    assert report.state == "lost"
    assert (report.why or "").startswith("its keeper ended before its first record: ")
    assert "no launch plan" in (report.why or "")
    # What an earlier keeper said is of no interest.
    os.utime(log, (0, 0))
    assert "never started" in (report_of(records).why or "")


def test_a_process_that_took_over_the_number_of_a_keeper_is_not_the_keeper(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert process_began(os.getppid()) is not None
    records.submit(pid=1)
    assert report_of(records).state == "lost"


def test_submitting_a_finished_run_again_leaves_it_finished(tmp_path: Path) -> None:
    from dthpc.resilience.attempts import config_digest
    from dthpc.rundir import read_json, write_json

    records = Records(tmp_path).submit().start().end("finished", "finish", "the run is finished")
    records.run.config.write_text("train: {steps: 200}\n")
    end = records.run.attempt(0).end
    write_json(end, {**read_json(end), "config_digest": config_digest(records.run)})
    assert report_of(records.submit(pid=DEAD_PID + 1)).state == "finished"
    records.run.config.write_text("train: {steps: 400}\n")
    assert report_of(records).state == "lost"
