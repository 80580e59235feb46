from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.comm.check import check
from dthpc.comm.fabric.devices import choose_devices
from dthpc.comm.fabric.live import read_network
from dthpc.config.schema import Config

STAT = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 200\n\t\tLink layer: {layer}\n"


EXPORTED: dict[str, str] = {}
"""What the user exported."""


def told(**keys: Any) -> list[str]:
    config = OmegaConf.structured(Config)
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return [error.message() for error in check(config, EXPORTED)]


def test_nothing_is_wrong_with_the_defaults() -> None:
    assert told() == []


def test_words_and_variables_are_refused_before_submission() -> None:
    assert "did you mean slingshot" in told(comm__fabric="slingshoot")[0]
    assert "cluster.gpus_per_node" in told(comm__backend="nccl")[0]
    assert told(comm__backend={"cpu": "gloo", "cuda": "nccl"}, cluster__gpus_per_node=4) == []
    (error,) = told(comm__environment={"GLOO_SOCKET_IFNAME": "^lo", "NCCL_DEBUG": "INFO", "UCX_TLS": None})
    assert error.startswith("comm.environment.GLOO_SOCKET_IFNAME=^lo: Gloo takes one whole name")


def test_a_recorded_topology_tells_which_fabric_the_nodes_lack(tmp_path: Path) -> None:
    recorded = tmp_path / "ibstat.txt"
    recorded.write_text(STAT.format(layer="InfiniBand"))
    assert told(comm__fabric="infiniband", placement__topology=str(recorded)) == []
    (error,) = told(comm__fabric="efa", placement__topology=str(recorded))
    assert "shows no usable efa device (it shows mlx5_0). Instead: comm=infiniband, or comm=auto" in error
    recorded.write_text("nothing of a network\n")
    assert told(comm__fabric="efa", placement__topology=str(recorded)) == []


@pytest.mark.parametrize("name", ["", "10.0.0.1", "fe80::1%eth0", "eth0,eth1", "^lo", "eth0 ", "much-too-long-a-name"])
def test_what_no_interface_is_called_is_refused_wherever_the_run_goes(name: str) -> None:
    (error,) = told(comm__interface=name, cluster__kind="slurm")
    assert error.startswith(f"comm.interface={name}: ")
    assert "comm.interface=null" in error


def test_an_interface_of_a_local_run_is_looked_for_here() -> None:
    assert told(comm__interface="lo") == []
    assert told(comm__interface="eth99", cluster__kind="slurm") == []
    (error,) = told(comm__interface="eth99")
    assert "has no such network interface" in error


@pytest.mark.parametrize("fabric", ["infiniband", "roce", "slingshot", "efa"])
def test_a_fabric_of_a_local_run_is_looked_for_here(fabric: str) -> None:
    there = choose_devices(read_network()).fabric
    found = told(comm__fabric=fabric)
    assert bool(found) == (there != fabric)
    for error in found:
        assert error.startswith(f"comm.fabric={fabric}: ")
        assert f"has no usable {fabric} device" in error
        assert f"comm.fabric={there}, or comm=auto" in error
    assert told(comm__fabric=fabric, cluster__kind="slurm") == []  # what its nodes have, only they know
    assert told(comm__fabric=fabric, cluster__setup=["module load ours"]) == []


def test_what_was_exported_and_the_ranks_would_refuse_is_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPORTED, "GLOO_SOCKET_IFNAME", "^lo")
    monkeypatch.setitem(EXPORTED, "NCCL_SOCKET_IFNAME", "10.0.0.1")
    for kind in ("local", "slurm"):
        (error,) = told(cluster__kind=kind)
        assert error.startswith("GLOO_SOCKET_IFNAME=^lo: Gloo takes one whole name")
    assert len(told(cluster__kind="slurm", cluster__gpus_per_node=1)) == 2
    assert told(cluster__kind="slurm", cluster__environment={"GLOO_SOCKET_IFNAME": "eth0"}) == []
    assert told(cluster__kind="slurm", cluster__setup=["module load ours"]) == []


def test_a_variable_is_no_list() -> None:
    (error,) = told(comm__environment={"NCCL_IB_HCA": ["mlx5_0", "mlx5_1"]})
    assert 'comm.environment.NCCL_IB_HCA="mlx5_0,mlx5_1"' in error
