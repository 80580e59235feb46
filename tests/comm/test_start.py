"""Real ranks start by their `comm` group: on one machine and on two, which are network namespaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dthpc.comm.start import all_agree
from dthpc.rundir import RunDir
from tests.comm.machines import Machine, answer, rank, why_not
from tests.comm.meeting import Peer

namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RunDir(tmp_path).attempt(0).path.mkdir(parents=True)
    return tmp_path


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with Machine("alpha", tmp_path) as alpha, Machine("beta", tmp_path) as beta:
        yield alpha, beta


def run(folder: Path, where: list[Machine | None], **request: Any) -> list[dict[str, Any]]:
    ranks = [rank(machine, folder, number, len(where), **request) for number, machine in enumerate(where)]
    return [answer(each) for each in ranks]


def test_on_one_machine_the_choice_and_its_reason_are_recorded(folder: Path) -> None:
    found = run(folder, [None, None], comm={"tune": True})
    assert [one["sum"] for one in found] == [3.0, 3.0]
    for one in found:
        assert one["backend"] == "gloo"
        assert "MPI is not taken: no MPI launcher started this process" in one["backend_reason"]
        assert "nothing to measure: gloo alone works here" in one["backend_reason"]
        assert one["env"] == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_fabric_that_the_machine_lacks_ends_all_ranks_with_the_reason(folder: Path) -> None:
    for one in run(folder, [None, None], comm={"fabric": "slingshot"}):
        assert "comm.fabric=slingshot: here has no usable slingshot device" in one["error"]


@namespaces
def test_two_nodes_take_their_common_network_although_rank_0_is_known_by_another(
    folder: Path, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    alpha.cable("aaa0", "10.1.0.1/24", beta, "eno1", "10.1.0.2/24")
    alpha.cable("ib0", "10.9.0.1/24", beta, "ib0", "10.9.0.2/24")
    alpha.hosts.write_text("127.0.0.1 localhost\n10.1.0.1 alpha\n")
    environment = {"NCCL_NET": "Socket", "UCX_TLS": "tcp"}
    found = run(folder, [alpha, alpha, beta], nodes=2, comm={"fabric": "tcp", "environment": environment})
    assert [one["sum"] for one in found] == [6.0] * 3
    assert [one["env"]["GLOO_SOCKET_IFNAME"] for one in found] == ["ib0"] * 3
    # Neither NCCL nor MPI is in use.
    assert all(set(one["env"]) == {"GLOO_SOCKET_IFNAME"} for one in found)
    assert "all nodes are in 10.9.0.0/24" in found[0]["fabric_reason"]


@namespaces
def test_a_network_that_does_not_lead_to_rank_0_is_left_and_that_is_said(
    folder: Path, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    alpha.cable("eth0", "10.1.0.1/24", beta, "eth0", "10.1.0.2/24")
    alpha.add("ib0", "10.9.0.1/24")  # two cables that lead nowhere
    beta.add("ib0", "10.9.0.2/24")
    found = run(folder, [alpha, beta], nodes=2, comm={})
    assert [one["sum"] for one in found] == [3.0, 3.0]
    assert [one["env"]["GLOO_SOCKET_IFNAME"] for one in found] == ["eth0", "eth0"]
    assert "10.9.0.1 on alpha was to be reached from beta over ib0" in found[0]["fabric_notes"][-1]


@namespaces
def test_what_a_node_exported_and_cannot_work_ends_the_run_on_both(
    folder: Path, machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, beta = machines
    alpha.cable("eth0", "10.1.0.1/24", beta, "eth0", "10.1.0.2/24")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker")
    for one in run(folder, [alpha, beta], nodes=2, comm={}):
        assert "GLOO_SOCKET_IFNAME=^lo,docker: Gloo takes one whole name" in one["error"]
        assert "GLOO_SOCKET_IFNAME=eth0" in one["error"]


@namespaces
def test_each_rank_takes_the_rail_at_its_own_cores(folder: Path, machines: tuple[Machine, Machine]) -> None:
    alpha, beta = machines
    for number in range(2):
        alpha.cable(f"hsn{number}", f"10.{number}.0.1/24", beta, f"hsn{number}", f"10.{number}.0.2/24")
    found = run(folder, [alpha, beta], nodes=2, comm={}, near=["hsn1"])
    assert [one["sum"] for one in found] == [3.0, 3.0]
    assert [one["env"]["GLOO_SOCKET_IFNAME"] for one in found] == ["hsn1", "hsn1"]


def test_all_ranks_hear_the_same_objection() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()
    heard: dict[tuple[str, int], str | None] = {}

    def ask(number: int) -> None:
        heard["yes", number] = all_agree(store, "yes", Peer(number, 3, "n"), None)
        heard["no", number] = all_agree(store, "no", Peer(number, 3, "n"), "no library" if number == 1 else None)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [heard["yes", number] for number in range(3)] == [None] * 3
    assert [heard["no", number] for number in range(3)] == ["rank 1 on n: no library"] * 3
