"""`python -m dthpc.doctor --network`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dthpc.doctor import main
from tests.comm.fabric.texts import LO, wired


def files(folder: Path, *texts: str) -> list[str]:
    for number, text in enumerate(texts):
        (folder / f"n{number}.txt").write_text(text)
    return [str(folder / f"n{number}.txt") for number in range(len(texts))]


def test_nodes_and_the_decision_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [LO + wired(2, "docker0", "172.17.0.1/16") + wired(3, "eth0", f"10.0.0.{n}/24") for n in (1, 2)]
    assert main(["--network", *files(tmp_path, *texts)]) == 0
    shown = capsys.readouterr().out
    assert "n0.txt: eth0: all nodes are in 10.0.0.0/24" in shown
    assert "NCCL_SOCKET_IFNAME==eth0" in shown
    assert "made by a container engine" in shown


def test_what_cannot_work_is_an_exit_code_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [LO + wired(2, "eno1", "10.1.0.1/24"), LO + wired(2, "ens3", "10.2.0.1/24")]
    assert main(["--network", *files(tmp_path, *texts), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["plan"]["problems"][0]["what"] == "the nodes have no network in common"
    assert list(value["nodes"]) == ["n0.txt", "n1.txt"]


def test_this_machine_is_asked_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--network", "--json"]) in (0, 1)
    (node,) = json.loads(capsys.readouterr().out)["nodes"].values()
    assert node["live"]
    assert "lo" in node["interfaces"]


def test_a_text_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--network", *files(tmp_path, "nothing\n")]) == 2
    assert "the text tells of no network" in capsys.readouterr().err
