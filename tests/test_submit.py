"""The door: exit codes and what is printed. The keepers are `true` and `false`; one run is a real one, of a job that
only returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dthpc.rundir import RunDir, write_json
from dthpc.submit import main
from tests.launch.sites import add_command

REPOSITORY = Path(__file__).resolve().parents[1]
ONE = ["cluster.tasks_per_node=1", "run.name=a"]
QUIET = [*ONE, "cluster.python=/bin/true", "follow=false"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command is typed, on a machine without Slurm."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return folder


def submit(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(Path.cwd())])}
    command = [sys.executable, "-m", "dthpc.submit", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def finish(run: RunDir) -> None:
    """The records of an attempt that finished."""
    write_json(run.attempt(0).start, {"pid": 1, "time": 1.0})
    write_json(run.attempt(0).end, {"cause": "finished", "decision": "finish", "reason": "the run is finished"})


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_submitted_run_is_told_with_what_to_type_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUIET) == 0
    out, err = capsys.readouterr()
    first, second, third = out.splitlines()
    process = first.split()[2].rstrip(":")
    assert first == f"submitted process {process}: run a in {here}/runs/a"
    assert second == f"  follow it: python -m dthpc.status {here}/runs/a --watch"
    assert third == f"  end it:    kill {process}"
    assert err == ""


def test_a_submitted_run_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUIET, "json=true"]) == 0
    (run,) = told(capsys)["runs"]
    assert run.pop("job_id").isdigit()
    assert run == {"name": "a", "path": f"{here}/runs/a", "kind": "local", "state": "submitted"}


def test_json_is_given_at_once_and_nothing_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE, "cluster.python=/bin/false", "follow=true", "json=true"]) == 0
    assert told(capsys)["runs"][0]["state"] == "submitted"


def test_a_followed_run_that_never_starts_is_a_failure(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE, "cluster.python=/bin/false"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"run a: {here}/runs/a\n")
    assert "its keeper never started" in out


def test_a_mistake_is_a_line_on_stderr_and_code_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUIET, "train.steps=0", "optim.lr=-1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == [
        "dthpc: optim.lr=-1.0: a learning rate is positive and finite. Instead: optim.lr=1e-3",
        "dthpc: train.steps=0: too small. Instead: give at least 1",
    ]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [["train.steps=0"], ["train.stps=3"], ["run.root=/proc/nothing"]])
def test_a_mistake_as_json_has_four_fields_wherever_it_was_found(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUIET, "json=true", *words]) == 2
    out, err = capsys.readouterr()
    (error,) = json.loads(out)["errors"]
    assert error.keys() == {"key", "value", "why", "instead"}
    assert f"{error['why']}. Instead: {error['instead']}" in err


def test_warnings_go_to_stderr_and_keep_json_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUIET, "cluster.tasks_per_node=999", "train.global_batch=999", "json=true"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["runs"]) == 1
    assert err.startswith("dthpc: 999 ranks of 1 core on ")
    assert err.count("\n") == 1


def test_a_warning_that_all_runs_of_a_sweep_share_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster.tasks_per_node=999", "train.global_batch=999", "cluster.python=/bin/true", "follow=false"]
    assert main(["-m", "run.seed=1,2", *words]) == 0
    out, err = capsys.readouterr()
    assert out.count("submitted process") == 2
    assert err.count("share cores") == 1


def test_a_dry_run_shows_the_plan_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUIET, "dry_run=true"]) == 0
    assert "dthpc.attempt.rank" in capsys.readouterr().out
    assert main([*QUIET, "dry_run=true", "json=true"]) == 0
    assert told(capsys)["runs"][0]["kind"] == "local"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("form", ["json=false", "json=true"])
def test_a_dry_run_of_what_would_be_refused_ends_with_2(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUIET, "dry_run=true", "run.root=/proc/nothing", form]) == 2
    assert "nothing can be written to /proc" in capsys.readouterr().out


def test_a_finished_run_is_not_started_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUIET) == 0
    finish(RunDir(here / "runs/a"))
    capsys.readouterr()
    before = (here / "runs/a/events.jsonl").read_text()
    assert main([*ONE, "cluster.python=/bin/false", "follow=true"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == (f"run a is finished already, and the same command would give the same result: {here}/runs/a")
    assert lines[1] == f"  look at it: python -m dthpc.status {here}/runs/a"
    assert "run.on_change=accept run.name=a" in lines[2]
    assert "run.seed" in lines[3]
    assert (len(lines), err) == (4, "")
    assert (here / "runs/a/events.jsonl").read_text() == before


def test_a_finished_run_among_others_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUIET) == 0
    finish(RunDir(here / "runs/a"))
    capsys.readouterr()
    assert main(["-m", "run.name=a,b", *QUIET[:1], *QUIET[2:], "json=true"]) == 0
    first, second = told(capsys)["runs"]
    assert (first["name"], first["state"], first["job_id"]) == ("a", "finished", None)
    assert (second["name"], second["state"]) == ("b", "submitted")
    assert second["job_id"].isdigit()


def test_a_job_of_slurm_is_told_with_scancel(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bin_folder = tmp_path / "bin"
    partition = "PartitionName=p Default=YES Nodes=n[1-3] TotalNodes=3 TotalCPUs=24 State=UP MaxTime=UNLIMITED"
    add_command(
        bin_folder,
        "scontrol",
        f'case "$*" in *partition*) echo "{partition}";; *) echo "SLURM_VERSION = 22.05.8";; esac',
    )
    add_command(bin_folder, "sinfo", 'echo "p|3|8|8000|(null)|idle"')
    add_command(bin_folder, "sbatch", 'echo "Submitted batch job 41"')
    for name in ("srun", "squeue", "sacctmgr", "sacct", "scancel"):
        add_command(bin_folder, name, "exit 0")
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    assert main([*ONE, "+cluster=slurm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"submitted job 41: run a in {here}/runs/a\n")
    assert out.endswith("  end it:    scancel 41\n")


def test_questions_about_the_configuration_are_answered_and_start_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cfg", "job", *QUIET]) == 0
    assert "name: a" in capsys.readouterr().out
    assert list(here.iterdir()) == []


def test_modules_of_the_folder_in_which_it_is_typed_are_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path[:] = [path for path in sys.path if path not in ("", str(here))]
    words = [*QUIET, "job._target_=mine_of_test_submit.run", "dry_run=true"]
    assert main(words) == 2
    (here / "mine_of_test_submit.py").write_text("def run(config, context): ...\n")
    assert main(words) == 0


def test_ctrl_c_while_the_site_is_asked_ends_with_130(here: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    for name in ("scontrol", "sinfo", "sbatch", "srun", "squeue", "sacctmgr"):
        # It tells that it was asked, and then never answers.
        add_command(tmp_path / "bin", name, f'echo asked > "{asked}"; exec sleep 60')
    command = [sys.executable, "-m", "dthpc.submit", *ONE, "+cluster=slurm"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it runs in the background with the signal ignored, which would be inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as door:
        assert asked.read_text().startswith("asked")
        os.killpg(door.pid, signal.SIGINT)
        out, err = door.communicate(timeout=60)
    assert (door.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert list(here.iterdir()) == []


def test_a_run_that_is_followed_to_its_end_and_then_typed_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (here / "mine.py").write_text("def run(config, context):\n    print('nothing to do')\n")
    words = [*ONE, "job._target_=mine.run", "follow=true"]
    done = submit(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to do" in (here / "runs/a/attempts/0/rank-00000.log").read_text()
    again = submit(*words)
    assert again.returncode == 0
    assert again.stdout.startswith("run a is finished already")
    assert sorted(path.name for path in (here / "runs/a/attempts").iterdir()) == ["0"]
