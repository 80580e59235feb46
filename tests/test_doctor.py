from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dthpc import doctor
from dthpc.placement.plan.wish import Wish

TOPO = """\
\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPXB\tSYS\t0-15,32-47\t0
GPU1\tNV12\t X \tSYS\tPXB\t16-31,48-63\t1
mlx5_0\tPXB\tSYS\t X \tSYS
mlx5_1\tSYS\tPXB\tSYS\t X
"""


@pytest.fixture
def topo(tmp_path: Path) -> Path:
    file = tmp_path / "topo.txt"
    file.write_text(TOPO)
    return file


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = doctor.main(["--ranks", "1", "--folder", str(tmp_path)])
    out = capsys.readouterr().out
    assert code in (0, doctor.EXIT_PROBLEMS)
    assert "memory node" in out
    assert "Placement" in out
    assert "Problems" in out


def test_another_machine_from_a_text(topo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--topology", str(topo)]) == 0
    out = capsys.readouterr().out
    assert "all" not in out.splitlines()[0]
    rows = [line.split() for line in out.splitlines() if line.lstrip().startswith(("0 ", "1 "))]
    assert [row[2:4] for row in rows] == [["GPU0", "0-11,32-43"], ["GPU1", "16-27,48-59"]]
    assert "nvidia-smi topo" in out


def test_json_has_the_topology_and_the_plan(topo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--topology", str(topo), "--ranks", "4", "--json", "--cpus", "0-31"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [gpu["key"] for gpu in told["topology"]["gpus"]] == ["GPU0", "GPU1"]
    assert [rank["gpus"][0]["name"] for rank in told["plan"]["ranks"]] == ["GPU0", "GPU0", "GPU1", "GPU1"]
    assert [rank["nics"][0]["name"] for rank in told["plan"]["ranks"]] == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]
    assert told["problems"] == []


def test_a_text_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TOPO))
    assert doctor.main(["--topology", "-", "--axes", "tp=2"]) == 0
    assert "GPU1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4", "--ranks", "4"], "--gpus=4: 2 GPUs are visible"),
        (["--gpus", "2", "--ranks", "3"], "3 ranks can't have equal shares of 2 GPUs"),
        (["--cpus", "60-70"], "CPUs 64-70 are outside"),
        (["--cpus", "a-b"], "'a-b' is no CPU"),
        (["--visible", "7"], "'7' is none of the 2 GPUs"),
        (["--reserve", "0-63"], "no core is left"),
        (["--axes", "tp"], "'tp' is no axis with its degree"),
        (["--ranks", "0"], "must be at least 1"),
        (["--ranks", "abc"], "--ranks=abc: no whole number"),
        (["--ranks", "1e3"], "--ranks=1e3: no whole number"),
        (["--ranks", "99999999999999999999"], "no whole number (of up to nine digits)"),
        (["--gpus", "-1"], "--gpus=-1: must be at least 0. Instead: --gpus 0"),
        (["--gpus"], "--gpus: no value is given. Instead: --gpus N"),
        (["--smt", "two"], "--smt=two: no such choice. Instead: valid ones are: all, one, spread"),
        (["--axes", "tp=999999"], "--axes=tp=999999: 999999 ranks are more than a layout is planned for"),
        (["--axes", "tp=300,shard=300"], "90000 ranks are more than"),
        (["--axes", ""], "--axes: the value is empty. Instead: --axes tp=4, or leave --axes out"),
        (["--reserve", ""], "--reserve: the value is empty"),
        (["--cpus", " "], "--cpus: the value is empty"),
        (["--network", ""], "--network: the value is empty"),
        (["--folder", ""], "--folder: the value is empty"),
        (["--visible", "7"], "--visible=7"),
        (["--cores", "2", "--hlepers", "1"], "--hlepers: there is no such option. Instead: did you mean --helpers"),
        (["--", "topo.txt"], "topo.txt: this word has no place here. Instead: --topology topo.txt"),
        (["-j", "4"], "-j: there is no such option"),
    ],
)
def test_demands_that_do_not_fit(
    topo: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert doctor.main(["--topology", str(topo), *words]) == doctor.EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def test_words_that_are_no_options_are_told_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["everything", "--json"]) == doctor.EXIT_USER_ERROR
    out, err = capsys.readouterr()
    (error,) = json.loads(out)["errors"]
    assert error["key"] == "everything"
    assert err == "dthpc: everything: this word has no place here. Instead: --topology everything\n"
    assert doctor.main(["--topology"]) == doctor.EXIT_USER_ERROR
    assert capsys.readouterr().err == "dthpc: --topology: no value is given. Instead: --topology FILE\n"


def test_an_option_that_says_nothing_about_what_is_looked_at_is_told(
    topo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--topology", str(topo), "--folder", "elsewhere"]) == 0
    assert capsys.readouterr().err.startswith("dthpc: --folder has no effect: with --topology, another machine")
    doctor.main(["--network", "--ranks", "2", "--smt", "all"])
    assert "dthpc: --ranks, --smt have no effect: --network tells of networks alone\n" in capsys.readouterr().err
    assert doctor.main(["--topology", str(topo), "--ranks", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_texts_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "damaged.txt"
    damaged.write_text("this is no topology\n")
    assert doctor.main(["--topology", str(damaged), "--json"]) == doctor.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert str(damaged) in captured.err
    assert json.loads(captured.out)["errors"][0]["instead"]
    assert doctor.main(["--topology", str(tmp_path / "absent")]) == doctor.EXIT_USER_ERROR


def test_ranks_default_to_one_a_gpu() -> None:
    arguments = doctor._parser().parse_args([])
    assert arguments.ranks is None
    assert Wish(1).gpus is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ranks 100000", "--ranks=100000: more than any node has CPUs"),
        ("--nics 3", "--nics=3: no rank can have more than 1 of the node's NICs. Instead: --nics 1"),
        ("--helpers 16", "--helpers=16: a rank's share is 16 cores, one of which at least computes"),
        ("--axes foo=2", "--axes=foo=2: 'foo' is no axis: valid ones are"),
        ("--axes tp=2,tp=2", "--axes=tp=2,tp=2: 'tp' is named twice"),
        ("--axes tp=3", "--axes=tp=3: 3 ranks of tp fit neither into the node's 2 nor over whole nodes"),
        ("--cores-per-rank 0", "--cores-per-rank=0: must be at least 1. Instead: --cores-per-rank 1"),
    ],
)
def test_an_option_that_can_not_be_met_is_told_by_its_name(
    topo: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert doctor.main(["--topology", str(topo), *words.split()]) == doctor.EXIT_USER_ERROR
    assert told in capsys.readouterr().err


def test_several_mistakes_are_told_together(topo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--topology", str(topo), "--helpers", "16", "--nics", "3", "--json"]
    assert doctor.main(words) == doctor.EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert [error["key"] for error in json.loads(out)["errors"]] == ["--nics", "--helpers"]
    assert err.count("dthpc: ") == 2


def test_a_cpu_that_this_machine_does_not_have_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--reserve", "65000"]) == doctor.EXIT_USER_ERROR
    assert "--reserve=65000: the node has no CPUs 65000. Instead: CPUs among " in capsys.readouterr().err


def test_an_outer_axis_may_go_beyond_the_node_and_no_visible_gpu_means_none(
    topo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--topology", str(topo), "--axes", "tp=2,shard=8"]) == 0
    assert doctor.main(["--topology", str(topo), "--visible", "", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert all(rank["gpus"] == [] for rank in told["plan"]["ranks"])
