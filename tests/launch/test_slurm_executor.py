"""Submission through submitit, to an sbatch that is a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.errors import UserError
from dthpc.launch.planning import make_plan
from dthpc.launch.site import Site
from dthpc.launch.slurm_executor import SlurmExecutor, SlurmJob
from dthpc.rundir import RunDir
from tests.launch.sites import add_command, client_of, make_config, make_site

SUBMITTED = 'echo "Submitted batch job 41"'


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, first on PATH; sbatch keeps the scripts and the environment that it is given."""
    folder = tmp_path / "bin"
    add_command(folder, "sbatch", f'cp "$1" "{folder}/script.$$"; env > "{folder}/env.$$"; {SUBMITTED}')
    for name in ("srun", "scontrol", "squeue"):
        add_command(folder, name, "exit 0")
    add_command(folder, "scancel", f'echo "$@" >> "{folder}/cancelled"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def plan(root: Path, name: str, **cluster: Any) -> tuple[RunDir, LaunchPlan]:
    run = RunDir(root / name)
    made = make_plan(make_config(root, **cluster), run, make_site())
    made.write(run)
    return run, made


def launch(commands: Path, plans: list[tuple[RunDir, LaunchPlan]], site: Site | None = None) -> list[SlurmJob]:
    return SlurmExecutor(site or make_site(), client_of(commands)).launch(plans)


def scripts(commands: Path) -> list[str]:
    return [path.read_text() for path in sorted(commands.glob("script.*"))]


def test_the_script_of_the_plan_is_what_is_submitted(tmp_path: Path, commands: Path) -> None:
    run, made = plan(tmp_path, "r", setup=["module load x", "echo 'ready'"], comment="it's 1 of 2", nodes="1-2")
    (job,) = launch(commands, [(run, made)])
    assert job.job_id == "41"
    assert scripts(commands) == [made.batch_script]
    assert (run.submissions / "41_submission.sh").read_text() == made.batch_script
    script = (made.batch_script or "").splitlines()
    assert script[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=1-2" in script
    assert "#SBATCH --open-mode=append" in script
    assert "#SBATCH --signal=USR2@300" in script
    assert f"#SBATCH --output={run.submissions}/%j.log" in script
    assert not any("wckey" in line or "--error" in line for line in script)
    assert script.index("module load x") < script.index("echo 'ready'") < script.index(script[-1])
    assert script[-1].startswith("exec ")
    assert script[-1].endswith(f"-m dthpc.attempt.keeper {run.path}")


def test_what_an_outer_job_left_does_not_reach_sbatch(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_DISTRIBUTION": "cyclic", "RANK": "1", "SLURM_CONF": "/c"}.items():
        monkeypatch.setenv(name, value)
    launch(commands, [plan(tmp_path, "r")])
    (seen,) = (path.read_text().splitlines() for path in commands.glob("env.*"))
    names = {line.partition("=")[0] for line in seen}
    assert not names & {"SLURM_JOB_ID", "SLURM_DISTRIBUTION", "RANK"}
    assert "SLURM_CONF" in names


def test_a_sweep_is_one_array_with_an_index(tmp_path: Path, commands: Path) -> None:
    plans = [plan(tmp_path, f"r{number}", array_parallelism=2) for number in range(3)]
    jobs = launch(commands, plans)
    assert [job.job_id for job in jobs] == ["41_0", "41_1", "41_2"]
    (script,) = scripts(commands)
    assert "#SBATCH --array=0-2%2" in script
    (index,) = (tmp_path / ".sweeps").glob("*/index.json")
    assert f"--sweep {index}" in script
    assert f"#SBATCH --output={index.parent}/%A_%a.log" in script
    assert json.loads(index.read_text()) == {"runs": [str(run.path) for run, _ in plans]}


def test_runs_with_other_demands_are_arrays_of_their_own(tmp_path: Path, commands: Path) -> None:
    plans = [plan(tmp_path, f"r{number}", nodes=nodes) for number, nodes in enumerate([1, 2, 1])]
    jobs = launch(commands, plans)
    assert [job.job_id for job in jobs] == ["41_0", "41", "41_1"]


def test_a_sweep_larger_than_an_array_may_be_is_refused(tmp_path: Path, commands: Path) -> None:
    plans = [plan(tmp_path, f"r{number}") for number in range(3)]
    with pytest.raises(UserError, match="MaxArraySize=3"):
        launch(commands, plans, make_site(max_array_size=3))
    assert scripts(commands) == []


def test_a_refusal_names_the_key_and_leaves_nothing(
    tmp_path: Path, commands: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add_command(commands, "sbatch", 'echo "sbatch: error: Invalid account specified" >&2; exit 1')
    run, made = plan(tmp_path, "r", account="nobody")
    with pytest.raises(UserError, match=r"cluster\.account=nobody: .*Invalid account specified"):
        launch(commands, [(run, made)])
    assert not run.submissions.exists()
    assert capfd.readouterr().err == "", "the message is told once, by whoever catches it"
    plans = [plan(tmp_path, f"s{number}", account="nobody") for number in range(2)]
    with pytest.raises(UserError):
        launch(commands, plans)
    assert list((tmp_path / ".sweeps").iterdir()) == []


def test_when_a_later_part_is_refused_the_earlier_one_is_cancelled(tmp_path: Path, commands: Path) -> None:
    add_command(commands, "sbatch", f'grep -q "nodes=2" "$1" && echo "sbatch: error: no" >&2 && exit 1; {SUBMITTED}')
    plans = [plan(tmp_path, "a", nodes=1), plan(tmp_path, "b", nodes=2)]
    with pytest.raises(UserError, match="no"):
        launch(commands, plans)
    assert (commands / "cancelled").read_text() == "41\n"


def test_a_controller_that_is_away_is_tried_again(tmp_path: Path, commands: Path) -> None:
    away = 'echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller" >&2; exit 1'
    add_command(
        commands, "sbatch", f'[ -e "{commands}/tried" ] || {{ touch "{commands}/tried"; {away}; }}; {SUBMITTED}'
    )
    run, made = plan(tmp_path, "r")
    assert launch(commands, [(run, made)])[0].job_id == "41"
    assert {path.resolve().name for path in run.submissions.glob("*.sh")} == {"41_submission.sh"}


def test_a_submission_that_got_through_before_the_time_out_is_found(tmp_path: Path, commands: Path) -> None:
    add_command(
        commands,
        "sbatch",
        f'echo "$1" > "{commands}/command"; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1',
    )
    add_command(commands, "squeue", f'echo "40|/other"; echo "43|$(cat {commands}/command)"')
    (job,) = launch(commands, [plan(tmp_path, "r")])
    assert job.job_id == "43"


def test_a_time_out_that_did_not_get_through_is_an_error(tmp_path: Path, commands: Path) -> None:
    add_command(commands, "sbatch", 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1')
    with pytest.raises(UserError, match="Socket timed out"):
        launch(commands, [plan(tmp_path, "r")])


def test_a_job_asks_slurm_for_its_state(commands: Path, tmp_path: Path) -> None:
    add_command(commands, "scontrol", 'echo "JobId=41 JobName=r JobState=COMPLETED"')
    job = SlurmJob(tmp_path, "41")
    assert (job.state, job.done()) == ("COMPLETED", True)
    job.cancel()
    assert (commands / "cancelled").read_text() == "41\n"
