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
        (["--gpus", "4", "--ranks", "4"], "cluster.gpus_per_node=4: 2 GPUs are visible"),
        (["--gpus", "2", "--ranks", "3"], "3 ranks can't have equal shares of 2 GPUs"),
        (["--cpus", "60-70"], "CPUs 64-70 are outside"),
        (["--cpus", "a-b"], "'a-b' is no CPU"),
        (["--visible", "7"], "'7' is none of the 2 GPUs"),
        (["--reserve", "0-63"], "no core is left"),
        (["--axes", "tp"], "'tp' is no axis with its degree"),
        (["--ranks", "0"], "must be at least 1"),
    ],
)
def test_demands_that_do_not_fit(
    topo: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert doctor.main(["--topology", str(topo), *words]) == doctor.EXIT_USER_ERROR
    assert message in capsys.readouterr().err


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
