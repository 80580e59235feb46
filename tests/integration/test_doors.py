"""The real command, as users type it: what goes wrong, what plugs in, and from where it works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# As small as a run can be that still does everything a run does.
TINY = ["model.dim=16", "model.layers=1", "model.heads=2", "train.seq_len=16", "train.global_batch=4", "train.steps=4"]
TINY += ["train.eval_every=-1", "data=text"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"{number}: the quick brown fox jumps over the lazy dog\n" * 40)
    return folder


def submit(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dthpc.submit", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def tiny(texts: Path, *words: str) -> list[str]:
    return [*TINY, f"data.source.path={texts}", f"data.cache_dir={texts.parent / 'cache'}", *words]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.stps=3"], "did you mean steps?"),
        (["train.steps=0", "optim.lr=-1"], "optim.lr=-1"),
        (["cluster.nodes=0"], "cluster.nodes=0"),
        (["cluster.nodes=two"], "cluster.nodes=two"),
        (["run.name=../up"], "run.name"),
        (["run.root=/proc/nothing"], "run.root"),
        (["data=text", "data.source.path=/nowhere"], "/nowhere"),
        (["+cluster=slurm"], "Slurm"),
        (["+cluster=allocation"], "Slurm"),
        (["parallel.dp=3"], "parallel.dp=3"),
        (["parallel.tp=3"], "parallel.tp=3"),
        (["parallel.cp=2"], "parallel.cp=2"),
        (["comm.backend=nccl"], "nccl"),
        (["model.heads=3"], "model.heads=3"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(tmp_path: Path, words: list[str], expected: str) -> None:
    hidden = {
        "PATH": os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    }
    done = submit(tmp_path, *words, "train.steps=4" if "train.steps=0" not in words else "json=false", **hidden)
    assert done.returncode == 2, done
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("dthpc: ") for line in done.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_come_in_one_report_also_as_json(tmp_path: Path) -> None:
    done = submit(tmp_path, "train.steps=0", "optim.lr=-1", "precision.compute=fp7", "json=true")
    errors = json.loads(done.stdout)["errors"]
    assert {error["key"] for error in errors} == {"train.steps", "optim.lr", "precision.compute"}
    assert all(error["instead"] for error in errors)


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path: Path) -> None:
    done = submit(tmp_path, "dry_run=true", "cluster.tasks_per_node=2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 node" in done.stdout
    assert "dthpc.attempt.rank" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_users_model_loss_data_and_callback_plug_in(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import torch
from dthpc.train.callbacks import Callback

class Line(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
    def forward(self, inputs):
        return self.layer(inputs)

class Points:
    def __init__(self, width):
        torch.manual_seed(0)
        self.train = [(x := torch.randn(width), x.sum(0, keepdim=True)) for _ in range(64)]
        self.valid = self.train[:8]

def squared(outputs, targets):
    return ((outputs - targets) ** 2).sum(), torch.tensor(targets.numel())
squared.count_targets = lambda targets: targets.numel()

class Diary(Callback):
    def __init__(self, path):
        self.path = path
    def on_train_end(self, training):
        if training.context.is_first:
            open(self.path, "w").write(f"{training.state.step} {training.last_eval.loss}")
"""
    )
    words = ["model=mine", "data=mine", "loss._target_=mine.squared", "optim.lr=0.3", "optim=adamw"]
    for group, text in {
        "model": "_target_: mine.Line\nwidth: 3\n",
        "data": "_target_: mine.Points\nwidth: 3\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    words += ["+callbacks.diary._target_=mine.Diary", f"+callbacks.diary.path={tmp_path / 'diary'}"]
    words += ["train.steps=40", "train.global_batch=8", "train.eval_every=0", "run.name=mine"]
    done = submit(tmp_path, "--config-dir", "conf", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    step, loss = (tmp_path / "diary").read_text().split()
    assert int(step) == 40
    assert float(loss) < 0.1


def test_a_sweep_is_one_run_each_and_a_second_time_there_is_nothing_to_do(tmp_path: Path, texts: Path) -> None:
    words = tiny(texts, "-m", "run.seed=1,2")
    done = submit(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all((run / "checkpoints" / "step-00000004").is_dir() for run in runs)
    assert not (tmp_path / "multirun.yaml").exists()
    again = submit(tmp_path, *words)
    assert again.returncode == 0
    assert again.stdout.count("is finished already") == 2


def test_a_name_that_another_configuration_has_is_refused_until_the_change_is_accepted(
    tmp_path: Path, texts: Path
) -> None:
    assert submit(tmp_path, *tiny(texts, "run.name=a")).returncode == 0
    refused = submit(tmp_path, *tiny(texts, "run.name=a", "train.steps=6"))
    assert refused.returncode == 2
    assert "train.steps: 4 → 6" in refused.stderr
    accepted = submit(tmp_path, *tiny(texts, "run.name=a", "train.steps=6", "run.on_change=accept"))
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-00000006").is_dir()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "thesis.tex").write_text("years of work")
    done = submit(tmp_path, *tiny(texts, "run.name=a"))
    assert done.returncode == 2
    assert "run.name" in done.stderr
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["thesis.tex"]


def test_records_tell_the_environment_without_its_secrets(tmp_path: Path, texts: Path) -> None:
    done = submit(tmp_path, *tiny(texts, "run.name=a"), WANDB_API_KEY="hunter2hunter2", COLOUR_OF_DAY="green")
    assert done.returncode == 0, done.stdout + done.stderr
    written = "".join(p.read_text(errors="replace") for p in (tmp_path / "runs").rglob("*") if p.is_file())
    assert "hunter2hunter2" not in written
    environment = json.loads((tmp_path / "runs" / "a" / "attempts" / "0" / "environment.json").read_text())
    assert "torch" in json.dumps(environment)


def test_the_login_path_loads_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dthpc.submit", "dry_run=true"]
    listing = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stderr
    loaded = {line.rpartition("|")[2].strip() for line in listing.splitlines() if re.match("import time:", line)}
    assert "hydra" in loaded
    assert not loaded & {"torch", "numpy", "mpi4py", "tensorboardX"}


def test_the_wheel_works_from_any_folder(tmp_path: Path, texts: Path) -> None:
    # From a copy: building leaves folders beside the sources.
    sources = tmp_path / "sources"
    for name in ("dthpc", "conf"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources)
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(sources)]
    subprocess.run(build, check=True, timeout=240, capture_output=True)
    (wheel,) = wheels.glob("dthpc-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = submit(elsewhere, *tiny(texts, "run.name=a"), PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (elsewhere / "runs" / "a" / "checkpoints" / "step-00000004" / "manifest.json").is_file()
    environment = json.loads((elsewhere / "runs" / "a" / "attempts" / "0" / "environment.json").read_text())
    assert str(REPOSITORY) not in json.dumps(environment.get("git", {}))


def test_a_shell_completes_groups_options_and_keys(tmp_path: Path) -> None:
    """In a real bash: the script that the door prints is installed, and Tab is pressed."""
    command = tmp_path / "dthpc-submit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dthpc.submit "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(dthpc-submit -sc install=bash)"
        complete -p dthpc-submit >/dev/null || exit 1
        for line in "dthpc-submit model=gpt_s" "dthpc-submit train.se" "dthpc-submit +cluster=sl"; do
            COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line) COMP_CWORD=1
            hydra_bash_completion
            echo "${COMPREPLY[@]}"
        done
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["model=gpt_small", "train.seq_len=", "+cluster=slurm"]
