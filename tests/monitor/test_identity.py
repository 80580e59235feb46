from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.monitor.identity import code_identity, environment_identity, scrub, write_environment
from dthpc.rundir import RunDir, read_json

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cr3t",
    "WANDB_API_KEY": "s3cr3t",
    "HF_TOKEN": "s3cr3t",
    "DB_PASSWORD": "s3cr3t",
    "MYSQL_PASS": "s3cr3t",
    "GOOGLE_APPLICATION_CREDENTIALS": "/s3cr3t.json",
    "HTTP_AUTHORIZATION": "Basic s3cr3t",
    "SLURM_JWT": "s3cr3t",
    "SESSION_COOKIE": "s3cr3t",
    "https_proxy": "http://user:s3cr3t@proxy:3128",
    "DATABASE_URL": "postgresql://u:s3cr3t@db/x",
    "INDEX": "https://host/simple?token=s3cr3t",
    "HARMLESS": "ghp_s3cr3ts3cr3ts3cr3t",
    "OTHER": "Bearer s3cr3ts3cr3t",
    "PEM": "-----BEGIN PRIVATE s3cr3t",
    "BASH_FUNC_module%%": "() { s3cr3t; }",
}
PLAIN = {
    "PATH": "/usr/bin",
    "SLURM_JOB_ID": "7",
    "http_proxy": "http://proxy:3128",
    "OMP_NUM_THREADS": "4",
    "PWD": "/x",
}


@pytest.mark.parametrize("name", SECRETS)
def test_what_looks_secret_is_never_written(name: str) -> None:
    assert scrub({name: SECRETS[name]}) == {}


def test_what_does_not_is() -> None:
    assert scrub({**SECRETS, **PLAIN}) == PLAIN


def test_the_environment_is_told_without_importing_what_it_names() -> None:
    code = (
        "import json, sys; from dthpc.monitor.identity import environment_identity;"
        "found = environment_identity({'LOADEDMODULES': 'gcc/12:cuda/12.4'});"
        "print(json.dumps([found, 'torch' in sys.modules or 'numpy' in sys.modules]))"
    )
    found, imported = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not imported
    assert found["modules"] == ["gcc/12", "cuda/12.4"]
    assert set(found["packages"]) >= {"torch", "submitit", "hydra-core"}
    assert found["python"] == sys.version.split()[0]
    assert found["cpus"] >= found["cpus_allowed"] >= 1


def test_a_container_is_told() -> None:
    assert environment_identity({"APPTAINER_CONTAINER": "/images/torch.sif"})["container"] == "/images/torch.sif"


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_uncommitted_changes_are_saved_beside_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, records = tmp_path / "project", tmp_path / "records"
    project.mkdir()
    records.mkdir()
    git(project, "init", "-q")
    (project / "model.py").write_text("layers = 2\n")
    git(project, "add", "model.py")
    git(project, "commit", "-q", "-m", "one")
    monkeypatch.chdir(project)
    clean = code_identity(records)["project"]
    assert clean["commit"] == git(project, "rev-parse", "HEAD")
    assert (clean["dirty"], clean["untracked"]) == (False, [])
    (project / "model.py").write_text("layers = 3\n")
    (project / "new.py").write_text("")
    dirty = code_identity(records)["project"]
    assert (dirty["dirty"], dirty["untracked"]) == (True, ["new.py"])
    assert "+layers = 3" in (records / dirty["diff"]).read_text()


def test_a_folder_without_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    run = RunDir(tmp_path)
    write_environment(run.attempt(0), {"PATH": "/nowhere", "HF_TOKEN": "s3cr3t"})
    text = run.attempt(0).environment.read_text()
    assert "s3cr3t" not in text
    assert read_json(run.attempt(0).environment)["code"] == {}
