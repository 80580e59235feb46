from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from dthpc.status import main
from dthpc.watch.report import STATES
from tests.watch.records import Records

ABSENT = "/nonexistent/bin"


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which Slurm is not installed; the real one is in tests/integration."""
    monkeypatch.setenv("PATH", ABSENT)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few runs."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    good = Records(root, "good").submit().start().steps(10, 200)
    good.write("eval", step=200, loss=2.0, bits_per_byte=3.1, bigram_bits_per_byte=3.4)
    good.write("train_end", step=200, seconds=100.0).end("finished", "finish", "the run is finished", progressed=True)
    bad = Records(root, "bad").submit().start().steps(10, 120)
    bad.fail(1, "ValueError: the data has a hole", at=1.0, log="line one\nValueError: the data has a hole\n")
    bad.end("crash", "stop", "3 attempts in a row ended without a new checkpoint")
    Records(root, "queued", kind="slurm").submit("77")
    return root


def test_the_table_has_one_line_a_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "STATE", "STEP", "LOSS", "BITS/BYTE", "ATTEMPTS", "JOB", "WHY"]
    table = {line.split()[0]: line for line in lines}
    assert table["good"].split()[:5] == ["good", "finished", "200/200", "0.500", "3.100"]
    assert "rank 1 on n1: ValueError: the data has a hole (3 attempts in a row" in table["bad"]
    assert "pending" in table["queued"]
    assert "not found on PATH: squeue" in table["queued"]


def test_one_run_tells_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bad"]) == 1
    shown = capsys.readouterr().out
    for words in (
        "state       failed: rank 1 on n1: ValueError: the data has a hole",
        "step        120/200",
        "checkpoint  none that verifies",
        "crash         stop      3 attempts in a row ended without a new checkpoint",
        "last lines of runs/bad/attempts/0/rank-00001.log:\n  | line one\n  | ValueError: the data has a hole",
        "mend the cause, then the same command with run.name=bad goes on",
    ):
        assert words in shown


@pytest.mark.parametrize("word", ["queued", "runs/queued", "77"])
def test_a_run_is_named_by_name_folder_or_job(root: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("run           queued\n")


def test_runs_may_stand_between_options(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["good", "--logs", "queued", "--root", "runs"]) == 0
    shown = capsys.readouterr().out
    assert "run           queued\n" in shown
    assert "no rank has written a log" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--wach", "good"], "--wach: there is no such option. Instead: did you mean --watch?"),
        (["good", "--root"], "--root: no value is given. Instead: --root FOLDER"),
        (["good", "--root="], "--root: the value is empty. Instead: --root runs, or leave --root out"),
        (["--logs=5", "good"], "--logs: takes no value. Instead: --logs alone, or leave it out"),
    ],
)
def test_words_that_are_no_options_are_told_in_one_line(
    root: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"dthpc: {told}\n")


def test_a_mistake_is_told_in_json_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["god", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["key"], error["value"]) == ("run", "god")
    assert "did you mean good?" in error["why"]


def test_the_logs_of_all_ranks_are_shown_when_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "good/attempts/0/rank-00000.log").write_text("hello from rank 0\n")
    assert main(["good", "--logs"]) == 0
    assert "runs/good/attempts/0/rank-00000.log:\n  | hello from rank 0" in capsys.readouterr().out


def test_an_unknown_run_names_the_nearest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qeued"]) == 2
    assert capsys.readouterr().err == "dthpc: run=qeued: there is no such run; did you mean queued?\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["4711"], "run=4711: no run had a job of this id"),
        (["--watch"], "--watch: follows one run"),
        (["good", "bad", "--watch"], "--watch=good bad: follows one run"),
        (["good", "--watch", "--json"], "--watch"),
        (["good", "--root", "empty"], "there is no run under empty"),
    ],
)
def test_what_cannot_be_done_is_said(
    root: Path, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert error in capsys.readouterr().err


def test_no_run_at_all_says_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert "Start one with: python -m dthpc.submit" in capsys.readouterr().out


def shape(value: Any) -> Any:
    """The names and types in a JSON value."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def test_json_has_a_stable_schema(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bad", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["runs"][0]["state"] in STATES
    assert shape(value) == {
        "schema": "int",
        "time": "float",
        "root": "str",
        "runs": [
            {
                "name": "str",
                "path": "str",
                "state": "str",
                "why": "str",
                "conflict": "NoneType",
                "kind": "str",
                "job_id": "NoneType",
                "job_state": "NoneType",
                "step": "int",
                "total_steps": "int",
                "loss": "float",
                "eval_step": "NoneType",
                "eval_loss": "NoneType",
                "bits_per_byte": "NoneType",
                "bigram_bits_per_byte": "NoneType",
                "unit": "str",
                "tokens_per_s": "float",
                "step_time": "float",
                "eta_s": "NoneType",
                "silent_s": "NoneType",
                "submitted": "float",
                "updated": "float",
                "awaits_start": "bool",
                "pending": "NoneType",
                "checkpoint": "NoneType",
                "rejected": [],
                "attempts": [
                    {
                        "number": "int",
                        "job_id": "NoneType",
                        "pid": "int",
                        "restart_count": "int",
                        "nodes": ["str"],
                        "started": "float",
                        "ended": "float",
                        "cause": "str",
                        "decision": "str",
                        "reason": "str",
                        "progressed": "bool",
                    }
                ],
                "failure": {
                    "attempt": "int",
                    "rank": "int",
                    "cause": "str",
                    "host": "str",
                    "error": "str",
                    "step": "int",
                    "log": "str",
                    "log_tail": ["str"],
                },
                "summary": "NoneType",
                "unreadable": [],
            }
        ],
    }


def test_json_of_all_runs_is_valid_even_with_a_loss_that_is_no_number(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Records(root, "diverged").submit().start().write("step", step=1, loss=float("nan"))
    assert main(["--json"]) == 0
    runs = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert set(runs) == {"good", "bad", "queued", "diverged"}
    assert runs["diverged"]["loss"] == "nan"


def test_a_checkpoint_that_verifies_is_told_and_a_newer_torn_one_too(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dthpc.checkpoint.manifest import Manifest, checksum

    folder = root / "good/checkpoints/step-00000200"
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"weights")
    manifest = Manifest(200, 0, 2, 1.0, {"part": checksum(folder / "part")}, {})
    (folder / "manifest.json").write_bytes(manifest.encode())
    (root / "good/checkpoints/step-00000210").mkdir()
    main(["good"])
    shown = capsys.readouterr().out
    assert "verified    step 200, by names and sizes" in shown
    assert "rejected    step-00000210: manifest.json cannot be read" in shown
    (folder / "part").write_bytes(b"wEights")
    main(["good", "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["checkpoint"]["verified"] == "quick"
    main(["good", "--verify", "--json"])
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert run["checkpoint"] is None
    assert "step-00000200: part does not match its checksum" in run["rejected"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dthpc.status", *words]


def on_terminal(words: list[str], columns: int = 140, **env: str) -> str:
    """What the command shows on a terminal."""
    main_end, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(words, stdout=side, env={**os.environ, "TERM": "xterm-256color", **env})
    os.close(side)
    text = b""
    while True:
        try:
            data = os.read(main_end, 65536)
        except OSError:
            break
        if not data:
            break
        text += data
    os.close(main_end)
    assert process.wait() == 0
    return text.decode()


def test_colour_is_for_terminals_that_want_it(root: Path) -> None:
    assert "\x1b[" in on_terminal(command(), PYTHONIOENCODING="utf-8")
    assert "\x1b[3" not in on_terminal(command(), PYTHONIOENCODING="utf-8", NO_COLOR="1")
    assert "\x1b" not in on_terminal(command(), TERM="dumb")


def test_a_narrow_terminal_gets_the_reasons_below_the_table(root: Path) -> None:
    lines = on_terminal(command(), columns=80, PYTHONIOENCODING="utf-8", NO_COLOR="1").splitlines()
    assert any(line.startswith("bad: rank 1 on n1: ValueError: the data has a hole") for line in lines)
    assert "WHY" not in lines[0]


def test_an_ascii_pipe_is_no_error(root: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command("bad"), env=env, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(root: Path) -> None:
    process = subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_the_root_may_be_another_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["good", "--root", str(root)]) == 0
    assert "run           good\n" not in capsys.readouterr().err
