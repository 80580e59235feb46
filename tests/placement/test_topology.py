from __future__ import annotations

import json

import pytest

from dthpc.placement.topology import (
    Core,
    Gpu,
    Link,
    Nic,
    NumaNode,
    Port,
    Topology,
    bus_id,
    pcie_level,
)

GPU = Gpu("GPU0", 0, numa=(1,), pcie=("root", "port", "switch", "down1"))
NEAR = Nic("mlx5_0", numa=(1,), pcie=("root", "port", "switch", "down2"))
FAR = Nic("mlx5_1", numa=(0,), pcie=("other", "port2"))
NODE = Topology(
    existing=frozenset(range(8)),
    allowed=frozenset({0, 1, 9}),
    numa=(NumaNode(0, frozenset({0, 1}), 2**30), NumaNode(8, frozenset(), 0, distances={0: 40, 8: 10})),
    cores=(Core(frozenset({0, 4}), 0, 0),),
    gpus=(GPU,),
    nics=(NEAR, FAR),
)


@pytest.mark.parametrize(
    ("a", "b", "numa", "level"),
    [
        (("r", "p", "s", "d1"), ("r", "p", "s", "d2"), None, "PIX"),
        (("r", "p"), ("r", "p"), None, "PIX"),
        (("r", "p", "s", "d1", "t", "e1"), ("r", "p", "s", "d2"), None, "PXB"),
        (("r", "p1"), ("r", "p2"), True, "PHB"),
        (("r", "p1"), ("q", "p2"), True, "NODE"),
        (("r", "p1"), ("q", "p2"), False, "SYS"),
        (None, ("q", "p2"), None, None),
    ],
)
def test_the_level_follows_from_the_bridges_and_then_from_the_memory_nodes(
    a: tuple[str, ...] | None, b: tuple[str, ...], numa: bool | None, level: str | None
) -> None:
    assert pcie_level(a, b, numa) == level


def test_the_nearest_nics_are_those_of_the_best_level_and_none_across_sockets() -> None:
    assert NODE.nearest_nics(GPU) == ("PIX", [NEAR])
    assert NODE.nearest_nics(GPU, [FAR]) == ("SYS", [])
    assert NODE.nearest_nics(GPU, []) == (None, [])


def test_what_a_source_said_of_a_pair_outweighs_the_tree() -> None:
    told = Topology(gpus=(GPU,), nics=(NEAR,), links=(Link("mlx5_0", "GPU0", "NODE"),))
    assert told.level(GPU, NEAR) == "NODE"


def test_devices_and_cpus_are_found_by_their_names() -> None:
    assert NODE.gpu(0) is NODE.gpu("GPU0") is GPU
    assert NODE.nic("mlx5_1") is FAR
    assert NODE.siblings(4) == {0, 4}
    assert NODE.siblings(7) is None
    assert NODE.numa_of_cpu(1) == 0
    assert NODE.usable_cpus() == {0, 1}
    assert Topology().usable_cpus() is None
    with pytest.raises(KeyError):
        NODE.gpu(5)


def test_json_holds_what_is_known_and_leaves_out_what_is_not() -> None:
    made = json.loads(json.dumps(NODE.to_json()))
    assert made["existing"] == "0-7"
    assert made["numa"][1] == {"index": 8, "cpus": "", "memory_bytes": 0, "distances": {"0": 40, "8": 10}}
    assert "host" not in made
    assert "bus_id" not in made["gpus"][0]


@pytest.mark.parametrize(
    ("nic", "usable"),
    [
        (Nic("mlx5_0", "infiniband", ports=(Port(1, "down"), Port(2, "active"))), True),
        (Nic("mlx5_0", "infiniband", ports=(Port(1, "down"),)), False),
        (Nic("mlx5_0", "infiniband"), None),
        (Nic("mlx5_0", "infiniband", ports=(Port(1, "active"),), virtual=True), True),
        (Nic("mlx5_an0", "roce", ports=(Port(1, "active"),), virtual=True), False),
        (Nic("siw0", "software", ports=(Port(1, "active"),)), False),
        (Nic("eth0", "ethernet", ports=(Port(1, "up"),), rdma=False), False),
    ],
)
def test_a_nic_is_usable_if_a_port_is_up_and_it_is_a_real_one(nic: Nic, usable: bool | None) -> None:
    assert nic.usable is usable


@pytest.mark.parametrize(
    ("text", "full"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("3b:00", "0000:3b:00.0"), ("0103:00:00.1", "0103:00:00.1"), ("GPU0", None)],
)
def test_bus_ids_in_their_full_form(text: str, full: str | None) -> None:
    assert bus_id(text) == full


def test_links_are_written_as_nvidia_smi_does() -> None:
    assert Link("a", "b", kind="nvlink", lanes=12).word == "NV12"
    assert Link("a", "b", kind="xgmi").word == "XGMI"
    assert Link("a", "b", "PHB").word == "PHB"
    assert Link("a", "b", "SYS", said="SOC").word == "SOC"
