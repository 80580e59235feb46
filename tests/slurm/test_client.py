"""The client against commands that are scripts: slow, busy, absent, or saying what Slurm says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dthpc.errors import UserError
from dthpc.slurm.client import SlurmClient, SlurmError

JOB = "JobId=5 JobName=x UserId=me(1) JobState=RUNNING NodeList=n1 NumNodes=1"


class Commands:
    """A folder of commands, and a client that finds only those."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pauses: list[float] = []

    def add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def client(self, **settings: float) -> SlurmClient:
        environment = {
            **os.environ,
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "SQUEUE_FORMAT": "%A",
            "HERE": str(self.folder),
        }
        return SlurmClient(environment=environment, pause=self.pauses.append, **settings)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def test_an_absent_command_says_what_to_do(tmp_path: Path) -> None:
    client = SlurmClient(environment={"PATH": str(tmp_path)})
    with pytest.raises(UserError, match=r"sbatch, scontrol.*module load slurm.*leave out \+cluster="):
        client.require("sbatch", "scontrol")


@pytest.mark.parametrize(
    "said",
    [
        "scontrol: fatal: Could not establish a configuration source",
        "scontrol: error: s_p_parse_file: unable to open file /etc/slurm/slurm.conf: No such file or directory",
    ],
)
def test_commands_without_a_cluster_are_told_as_that(commands: Commands, said: str) -> None:
    commands.add("scontrol", f'echo "{said}" >&2; exit 1')
    with pytest.raises(UserError, match=r"belongs to no cluster. Instead: work on a login node.*SLURM_CONF"):
        commands.client().config()


def test_a_busy_controller_is_asked_again(commands: Commands) -> None:
    commands.add(
        "scontrol",
        f'[ -e "$HERE/tried" ] && echo "{JOB}" && exit 0\n'
        'touch "$HERE/tried"; echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1',
    )
    job = commands.client().job("5")
    assert job is not None
    assert (job.state, job.nodes, job.source) == ("RUNNING", ["n1"], "scontrol")
    assert commands.pauses == [0.5]


def test_a_controller_that_stays_away_is_given_up(commands: Commands) -> None:
    commands.add("scontrol", 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1')
    with pytest.raises(SlurmError, match=r"scontrol show config: .*did not answer within 0 s.*connect failure"):
        commands.client(patience_s=0).config()


def test_a_command_that_hangs_is_a_controller_that_does_not_answer(commands: Commands) -> None:
    commands.add("scontrol", "exec sleep 60")
    with pytest.raises(SlurmError, match=r"no answer within 0\.2 s"):
        commands.client(timeout_s=0.2, patience_s=0).config()


def test_a_request_is_not_repeated_when_it_may_have_got_through(commands: Commands) -> None:
    commands.add("scancel", 'echo x >> "$HERE/calls"; echo "Socket timed out" >&2; exit 1')
    with pytest.raises(SlurmError):
        commands.client().cancel("5")
    assert (commands.folder / "calls").read_text() == "x\n"
    assert commands.pauses == []


def test_an_output_that_is_not_understood_is_shown_with_its_command(commands: Commands) -> None:
    commands.add("scontrol", 'echo "JobId=5 JobState=RUNNING NumTasks=lots"')
    with pytest.raises(SlurmError, match=r"scontrol --oneliner show job 5: .*NumTasks='lots'.*NumTasks=lots"):
        commands.client().job("5")


def test_a_job_is_looked_for_in_the_queue_and_in_accounting(commands: Commands) -> None:
    commands.add("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    commands.add("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    commands.add("sacct", 'echo "5|me|p|a|q|TIMEOUT|0:0|00:01:00|00:01:00|1|node=1|Unknown|Unknown|Unknown|n1"')
    job, note = commands.client().find_job("5")
    assert job is not None
    assert (job.state, job.source, note) == ("TIMEOUT", "sacct", "told by accounting")


def test_without_accounting_it_says_so(commands: Commands) -> None:
    commands.add("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    commands.add("squeue", "exit 0")
    commands.add("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    job, note = commands.client().find_job("5")
    assert job is None
    assert "accounting is off (AccountingStorageType=accounting_storage/none)" in note


def test_many_jobs_take_one_question_each(commands: Commands) -> None:
    noted = 'echo "$@" >> "$HERE/asked"; [ -z "$SQUEUE_FORMAT" ]'
    commands.add("squeue", f'{noted} && echo "5_1|RUNNING|None|p|me|0:05|1:00|N/A|1|n1"')
    commands.add("sacct", f'{noted} && echo "6|me|p|a|q|FAILED|1:0|00:01:00|00:01:00|1|node=1|N/A|N/A|N/A|n1"')
    jobs = commands.client().jobs(["6", "5_1", "7", "6"])
    assert {job_id: job.state for job_id, job in jobs.items()} == {"5_1": "RUNNING", "6": "FAILED"}
    queue, accounting = (commands.folder / "asked").read_text().splitlines()
    assert "--jobs=5_1,6,7" in queue
    assert "--jobs=6,7" in accounting
    assert commands.client().jobs([]) == {}
