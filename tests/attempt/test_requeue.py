from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.requeue import (
    RequeueForbidden,
    job_ended,
    job_name,
    make_client,
    requeue,
    restart_count,
    resubmit,
    scheduler_state,
    to_state,
)
from dthpc.resilience.decide import SchedulerState
from dthpc.slurm.client import SlurmError
from dthpc.slurm.records import parse_jobs
from tests.attempt.runs import make_run

# As `scontrol -o show job` printed them on a real Slurm 22.05, cut to what matters.
HEAD = "JobId=3 JobName=wrap UserId=root(0) GroupId=root(0) "
SHOWN = {
    "grace": "JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=2026-11-29T17:29:37 "
    "PreemptEligibleTime=2026-11-29T17:29:13 PreemptTime=2026-11-29T17:29:17 NodeList=node2",
    "requeued": "JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=Unknown NodeList=node3",
    "limit": "JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 EndTime=2026-11-29T17:30:32 "
    "PreemptTime=None NodeList=node1",
    "cancelled": "JobState=COMPLETING Reason=None Requeue=1 Restarts=0 EndTime=2026-11-29T17:29:16 "
    "PreemptTime=None NodeList=node1",
}
NOW = datetime(2026, 11, 29, 17, 29, 17).timestamp()


def state(case: str, restarts: int = 0) -> SchedulerState:
    return to_state(parse_jobs(HEAD + SHOWN[case])[0], restarts, NOW)


def test_what_scontrol_shows_becomes_the_state_that_decides() -> None:
    assert state("grace") == SchedulerState(True, preempted=True, seconds_left=20.0)
    assert state("requeued") == SchedulerState(False, requeued=True)
    assert state("requeued", restarts=1) == SchedulerState(False)
    assert state("limit") == SchedulerState(False, timed_out=True, seconds_left=75.0)
    assert state("cancelled") == SchedulerState(False, seconds_left=-1.0)


def test_a_task_of_an_array_is_named_as_one() -> None:
    # The last task's SLURM_JOB_ID is the id of the whole array.
    last = {"SLURM_JOB_ID": "36", "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_name(last) == "36_2"
    assert job_name({"SLURM_JOB_ID": "40"}) == "40"
    assert job_name({}) is None
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "3"}) == 3


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose `scontrol` and `sbatch` note how they were called, and answer what `answer` holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "sbatch"):
        command = folder / name
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n'
            f"env | sort > {tmp_path}/environment\n. {tmp_path}/answer\n"
        )
        command.chmod(0o755)
    (tmp_path / "answer").write_text("exit 0")
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "36", "SLURM_SUBMIT_DIR": "/home", "SLURM_CONF": "/c"}


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_job_that_is_already_queued_again_needs_nothing_more(tmp_path: Path, slurm: dict[str, str]) -> None:
    requeue(make_client(slurm), slurm)
    (tmp_path / "answer").write_text('echo "Job is pending execution for job 36" >&2; exit 1')
    requeue(make_client(slurm), {**slurm, "SLURM_ARRAY_JOB_ID": "30", "SLURM_ARRAY_TASK_ID": "6"})
    assert calls(tmp_path) == ["scontrol requeue 36", "scontrol requeue 30_6"]


@pytest.mark.parametrize(
    "said", ["Requested operation is presently disabled for job 36", "Only batch jobs are accepted or processed"]
)
def test_where_slurm_never_will_it_is_told_apart(tmp_path: Path, slurm: dict[str, str], said: str) -> None:
    (tmp_path / "answer").write_text(f'echo "{said}" >&2; exit 1')
    with pytest.raises(RequeueForbidden, match=said[:20]):
        requeue(make_client(slurm), slurm)
    (tmp_path / "answer").write_text('echo "Invalid job id specified" >&2; exit 1')
    with pytest.raises(SlurmError, match="Invalid job id"):
        requeue(make_client(slurm), slurm)


def test_a_continuation_follows_this_job_in_a_clean_environment(tmp_path: Path, slurm: dict[str, str]) -> None:
    run = make_run(tmp_path / "run", [["finish"]], batch_script="#!/bin/bash\nexec keeper\n")
    run.submissions.mkdir()
    (tmp_path / "answer").write_text('echo "77;cluster"')
    env = {**slurm, "SLURM_RESTART_COUNT": "1", "HOME": "/home/u"}
    assert resubmit(make_client(env), run, LaunchPlan.read(run), env, "job-36") == "77"
    (call,) = calls(tmp_path)
    assert call.startswith("sbatch --chdir=/home --parsable --dependency=afterany:36 ")
    assert Path(call.split()[-1]).read_text() == "#!/bin/bash\nexec keeper\n"
    passed = (tmp_path / "environment").read_text().splitlines()
    assert "DTHPC_CHAIN=job-36" in passed
    assert "HOME=/home/u" in passed
    assert [name for name in passed if name.startswith("SLURM_")] == ["SLURM_CONF=/c"]


def test_without_a_script_there_is_nothing_to_submit(tmp_path: Path, slurm: dict[str, str]) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    with pytest.raises(SlurmError, match="no batch script"):
        resubmit(make_client(slurm), run, LaunchPlan.read(run), slurm, "job-36")


def test_a_slurm_that_does_not_answer_leaves_the_question_open(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "answer").write_text('echo "scontrol: error: something unheard of" >&2; exit 1')
    assert scheduler_state(make_client(slurm), slurm) is None
    assert scheduler_state(make_client(slurm), {}) is None
    assert calls(tmp_path) == ["scontrol --oneliner show job 36"]


def test_a_job_of_another_lock_is_over_when_slurm_says_so(tmp_path: Path, slurm: dict[str, str]) -> None:
    for state, over in (("COMPLETED", True), ("RUNNING", False), ("PENDING", False)):
        (tmp_path / "answer").write_text(f'echo "JobId=9 JobName=x JobState={state} Reason=None"')
        assert job_ended(make_client(slurm), "9") is over
