from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dthpc.comm.check import check
from dthpc.config.schema import Config

STAT = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 200\n\t\tLink layer: {layer}\n"


def told(**keys: Any) -> list[str]:
    config = OmegaConf.structured(Config)
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return [error.message() for error in check(config)]


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
