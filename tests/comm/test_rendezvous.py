"""Ranks meet: on one machine, and on machines that are real network namespaces with addresses that mislead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dthpc.comm.rendezvous import RendezvousError, meet
from dthpc.resilience.outcome import RankRecord
from dthpc.rundir import AttemptDir, RunDir, read_json
from tests.attempt.runs import wait_for
from tests.comm.machines import Machine, answer, rank, why_not
from tests.comm.meeting import Peer

namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    folder = RunDir(tmp_path).attempt(0)
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, both called loopback by their hosts files."""
    with Machine("alpha", tmp_path) as alpha, Machine("beta", tmp_path) as beta:
        yield alpha, beta


def test_on_one_machine_ranks_use_loopback_and_no_fixed_port(tmp_path: Path, attempt: AttemptDir) -> None:
    found = [answer(process) for process in [rank(None, tmp_path, number, 2) for number in range(2)]]
    assert [(one["address"], one["interface"], one["sum"]) for one in found] == [("127.0.0.1", "lo", 3.0)] * 2
    assert found[0]["hosts"] == ["here"]
    published = read_json(attempt.rendezvous)
    assert published["store_port"] != published["hello_port"]
    assert all(not entry["address"].startswith("127.") for entry in published["candidates"])


ROGUE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    server.accept()[0].sendall(b"I am somebody else, and I answer")
"""


@namespaces
def test_decoys_are_seen_through_and_each_rank_takes_its_own_interface(
    tmp_path: Path, attempt: AttemptDir, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    for machine in machines:
        machine.add_bridge("docker0", "172.17.0.1/16")
        machine.add("aaa0", "192.168.122.1/24")  # before the real one in every respect, and the same everywhere
    alpha.cable("ib0", "10.9.0.1/24", beta, "eno1", "10.9.0.2/24")
    local = [rank(alpha, tmp_path, number, 3) for number in range(2)]
    published = wait_for(lambda: read_json(attempt.rendezvous), 60)
    rogue = beta.popen(sys.executable, "-c", ROGUE, "192.168.122.1", str(published["hello_port"]))
    assert rogue.stdout is not None
    assert rogue.stdout.readline() == "ready\n"
    found = [answer(process) for process in [*local, rank(beta, tmp_path, 2, 3)]]
    rogue.kill()
    rogue.communicate()
    offered = [entry["address"] for entry in published["candidates"]]
    assert offered == ["192.168.122.1", "10.9.0.1", "172.17.0.1"]
    assert [one["sum"] for one in found] == [6.0] * 3
    assert [one["exported"] for one in found] == ["ib0", "ib0", "eno1"]
    assert [one["address"] for one in found] == ["10.9.0.1", "127.0.0.1", "10.9.0.1"]
    assert found[0]["hosts"] == ["alpha", "beta"]


@namespaces
def test_a_network_of_ipv6_alone_will_do(
    tmp_path: Path, attempt: AttemptDir, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    alpha.cable("net0", "fd00:9::1/64", beta, "net0", "fd00:9::2/64")
    found = [answer(rank_) for rank_ in [rank(alpha, tmp_path, 0, 2), rank(beta, tmp_path, 1, 2)]]
    assert [one.get("sum") for one in found] == [3.0, 3.0], found
    assert [one["exported"] for one in found] == ["net0", "net0"]
    assert [entry["address"] for entry in read_json(attempt.rendezvous)["candidates"]] == ["fd00:9::1"]


@namespaces
def test_a_wanted_interface_is_the_only_one_offered(
    tmp_path: Path, attempt: AttemptDir, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    alpha.cable("eth0", "10.9.0.1/24", beta, "eth0", "10.9.0.2/24")
    alpha.cable("fast0", "10.8.0.1/24", beta, "fast0", "10.8.0.2/24")
    ranks = [rank(machine, tmp_path, number, 2, interface="fast0") for number, machine in enumerate(machines)]
    found = [answer(process) for process in ranks]
    assert [one["exported"] for one in found] == ["fast0", "fast0"]
    assert [entry["address"] for entry in read_json(attempt.rendezvous)["candidates"]] == ["10.8.0.1"]
    wrong = answer(rank(alpha, tmp_path, 0, 2, interface="fats0"))
    assert "comm.interface=fats0" in wrong["error"]
    assert "did you mean fast0" in wrong["error"]


@namespaces
def test_a_rank_that_can_reach_nothing_tells_what_it_tried(
    tmp_path: Path, attempt: AttemptDir, machines: tuple[Machine, Machine]
) -> None:
    alpha, beta = machines
    alpha.add_bridge("docker0", "172.17.0.1/16")
    alpha.add("eth0", "10.9.0.1/24")
    beta.add_bridge("docker0", "172.17.0.1/16")
    waiting = rank(alpha, tmp_path, 0, 2, timeout_s=6.0)
    wait_for(attempt.rendezvous.exists, 60)
    lost = answer(rank(beta, tmp_path, 1, 2, timeout_s=2.0))["error"]
    assert lost.startswith("rank 1 on beta could not reach rank 0 on alpha")
    assert "10.9.0.1 (eth0): " in lost
    assert "172.17.0.1 (docker0): connection refused" in lost
    left = answer(waiting)["error"]
    assert "ranks 1 of 2 did not arrive in time; those that did are on: alpha" in left
    assert "rank-00001.log" in left


def test_a_rank_that_has_ended_is_not_waited_for(attempt: AttemptDir) -> None:
    RankRecord(1, "crash", error="ImportError: no such module").write(attempt)
    with pytest.raises(RendezvousError, match="rank 1 ended before all had met: ImportError: no such module"):
        meet(Peer(0, 2, "here"), attempt, rendezvous_timeout_s=60.0)
    attempt.rendezvous.unlink()
    RankRecord(0, "user_error", error="bad value").write(attempt)
    with pytest.raises(RendezvousError, match="rank 0 ended before all had met: bad value"):
        meet(Peer(1, 2, "here"), attempt, rendezvous_timeout_s=60.0)


def test_a_silent_rank_0_is_named_with_its_log(attempt: AttemptDir) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 published no address in time .*rank-00000\.log"):
        meet(Peer(1, 2, "here"), attempt, rendezvous_timeout_s=0.1)


def test_what_the_user_exported_stays(tmp_path: Path, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = answer(rank(None, tmp_path, 0, 1))
    assert (found["interface"], found["exported"]) == (None, "lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
