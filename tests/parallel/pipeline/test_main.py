from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.parallel.pipeline.__main__ import main


def test_a_schedule_is_drawn_verified_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1f1b", "--ranks", "2", "--micro-batches", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 |F0|F1|.....|B0   |F2|B1   |..|B2   |",
        "rank 1 |..|F0|B0   |F1|B1   |F2|B2   |.....|",
        "1f1b: 2 ranks, 2 stages, 3 micro-batches",
        "verified: 12 actions, each there once, in an order without deadlock",
        "bubble: 0.333 of the computing time where forward, input gradient and weight gradient take equally long "
        "(formula: 0.333)",
        "peak activations, each of one micro-batch in a rank's layers: rank 0: 2, rank 1: 1",
    ]


def test_lists_instead_of_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interleaved", "--ranks", "2", "--micro-batches", "2", "--chunks", "3", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0: 0F0 0F1 2F0 2F1 4F0")
    assert lines[2] == "interleaved: 2 ranks, 6 stages, 2 micro-batches"
    assert lines[-1].startswith("peak activations, each of one micro-batch in 1/3 of a rank's layers: rank 0: ")


def test_one_rank_of_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1f1b", "--ranks", "4096", "--micro-batches", "8192", "--rank", "4095"]) == 0
    assert capsys.readouterr().out.startswith("4095F0 4095B0 4095F1 ")


def test_a_formula_that_does_not_hold_yet_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zbv", "--micro-batches", "3"]) == 0
    assert "bubble: 0.444 " in (shown := capsys.readouterr().out)
    assert "(formula for more micro-batches: 0.167)" in shown


def test_a_picture_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zbv", "--svg", str(tmp_path / "zbv.svg")]) == 0
    assert (tmp_path / "zbv.svg").read_text().startswith("<svg ")
    assert capsys.readouterr().out.startswith("rank 0 |0F0|")


def test_large_schedules_are_verified_but_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zb_h1", "--ranks", "64", "--micro-batches", "256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "(32,768 passes: too many to draw)"
    assert lines[2].startswith("verified: 49152 actions")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1f1b", "--ranks", "0"], "'0' is no whole number from 1 on"),
        (["1f1b", "--micro-batches", "many"], "'many' is no whole number"),
        (["1fib"], "parallel.schedule=1fib: there is no such pipeline schedule. Instead: did you mean 1f1b?"),
        ([], "SCHEDULE"),
        (["interleaved", "--micro-batches", "6"], "Instead: 4 or 8 micro-batches"),
        (["zbv", "--chunks", "3"], "parallel.chunks=3: zbv has 2 chunks"),
        (["1f1b", "--rank", "4"], "--rank=4: the ranks are 0 to 3"),
        (["1f1b", "--svg", "/nowhere/at/all.svg"], "--svg=/nowhere/at/all.svg: cannot be written"),
        (["1f1b", "--ranks", "4096", "--micro-batches", "8192"], "or --rank R for the actions of one rank"),
    ],
)
def test_mistakes_get_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_it_runs_as_a_module_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from dthpc.parallel.pipeline.__main__ import main; main(['gpipe']); "
        "sys.exit(bool({'torch', 'numpy', 'hydra'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "dthpc.parallel.pipeline", "gpipe"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("rank 0 |F0|F1|")
