from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc import __version__
from dthpc.cli import VERBS, main


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_no_verb_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: dthpc VERB" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dthpc {__version__}\n"


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert "there is no verb 'statsu'; did you mean status?" in capsys.readouterr().err


def test_a_verb_gets_the_other_words_and_gives_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--root", "/nonexistent/runs", "--json"]) == 0
    assert '"runs": []' in capsys.readouterr().out


def test_python_m_dthpc_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "dthpc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dthpc {__version__}\n"


@pytest.mark.parametrize("verb", ["--help", "status"])
def test_heavy_modules_are_not_imported(verb: str) -> None:
    words = [verb] if verb == "--help" else [verb, "--root", "/nonexistent/runs"]
    code = (
        "import sys\nfrom dthpc.cli import main\n"
        f"main({words!r})\n"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'submitit', 'mpi4py', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"], ["train.stepz=3"]])
def test_dthpc_submit_is_python_m_dthpc_submit(words: list[str], tmp_path: Path) -> None:
    def run(*command: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", *command, *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run("dthpc", "submit") == run("dthpc.submit")
