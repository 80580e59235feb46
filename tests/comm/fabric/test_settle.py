"""What running ranks make of the decision: filtered by library, published by node, exported unless the user did."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dthpc.comm.fabric.decide import FabricWish
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.recognise import from_text
from dthpc.comm.fabric.settle import (
    Request,
    collect,
    decide_for,
    export,
    fall_back,
    publish,
    publish_error,
    receive,
    slim,
    tell,
)
from dthpc.errors import UserError
from tests.comm.fabric.texts import LO, infiniband, wired

CARD = "mlx5_0 port 1 (ACTIVE) ==> ib0 (Up)\n"
BOTH = frozenset({"gloo", "nccl"})


def node(text: str, name: str) -> NodeNetwork:
    return from_text(LO + text, name)[0]


def fabric_nodes(count: int = 2) -> dict[str, NodeNetwork]:
    return {f"id{n}": node(infiniband(2, "ib0", f"10.0.0.{n + 1}/24") + CARD, "host") for n in range(count)}


def test_facts_and_plans_go_through_the_store_once_a_node() -> None:
    store = HashStore()
    network = node(wired(2, "eth0", "10.0.0.1/24"), "n1")
    assert [tell(store, "id1", network), tell(store, "id1", network)] == [True, False]
    networks = collect(store, {"id1": "one"})
    assert networks["id1"].interfaces == {"eth0": network.interfaces["eth0"]}
    settled = decide_for(networks, "id1", Request())
    publish(store, settled)
    assert receive(store, "id1") == settled["id1"]
    publish_error(store, ["id1"], UserError("no way", key="comm.fabric", value="efa", instead="comm=tcp"))
    with pytest.raises(UserError, match=r"comm\.fabric=efa: no way\. Instead: comm=tcp"):
        receive(store, "id1")


def test_only_variables_of_libraries_in_use_are_set_and_the_found_fabric_is_pinned() -> None:
    gloo = decide_for(fabric_nodes(), "id0", Request())["id1"]
    assert set(gloo.environment) == {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
    nccl = decide_for(fabric_nodes(), "id0", Request(libraries=BOTH))["id1"]
    assert nccl.fabric == "infiniband"
    assert nccl.environment["NCCL_NET"] == "IB"
    assert nccl.environment["NCCL_IB_HCA"] == "=mlx5_0"
    assert nccl.environment["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert not [name for name in nccl.environment if name.startswith(("UCX_", "OMPI_"))]
    mpi = decide_for(fabric_nodes(), "id0", Request(libraries=frozenset({"gloo", "mpi"})))["id0"]
    assert (mpi.environment["UCX_NET_DEVICES"], "tcp" in mpi.environment["UCX_TLS"]) == ("mlx5_0:1", False)


def test_a_node_without_the_fabric_ends_a_run_that_needs_it_and_is_said_to_others() -> None:
    mixed = {**fabric_nodes(), "id9": node(infiniband(2, "ib0", "10.0.0.9/24"), "poor")}
    with pytest.raises(UserError, match=r"poor has no usable infiniband.*leave the node out"):
        decide_for(mixed, "id0", Request(libraries=BOTH))
    assert any("poor has no usable infiniband" in note for note in decide_for(mixed, "id0", Request())["id0"].notes)


def test_settings_of_a_library_that_is_not_used_do_not_end_a_run() -> None:
    from dataclasses import replace

    wrong = {"id0": replace(fabric_nodes(1)["id0"], settings={"NCCL_SOCKET_IFNAME": "10.0.0.1"})}
    assert decide_for(wrong, "id0", Request())["id0"].interface == "ib0"
    with pytest.raises(UserError, match=r"NCCL_SOCKET_IFNAME=10\.0\.0\.1: it takes names of interfaces.*=ib0"):
        decide_for(wrong, "id0", Request(libraries=BOTH))


def test_nodes_without_a_common_network_get_no_interface_and_a_remark() -> None:
    apart = {"a": node(wired(2, "eno1", "10.1.0.1/24"), "a"), "b": node(wired(2, "ens3", "10.2.0.1/24"), "b")}
    settled = decide_for(apart, "a", Request())
    assert [each.interface for each in settled.values()] == [None, None]
    assert settled["a"].environment == {}
    assert any("no network in common" in note for note in settled["a"].notes)


def test_the_users_word_wins_over_the_decision_and_the_placement_does_not() -> None:
    settled = decide_for(fabric_nodes(), "id0", Request(libraries=BOTH))["id0"]
    environ = {"NCCL_NET": "Socket", "NCCL_IB_HCA": "=mlx5_0", "GLOO_SOCKET_IFNAME": ""}
    made = export(settled, Request(placed={"NCCL_IB_HCA": "=mlx5_0"}), environ)
    assert environ["NCCL_NET"] == "Socket"
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert environ["NCCL_IB_HCA"] == "=mlx5_0"
    assert "NCCL_IB_HCA" not in made
    # Devices that the placement dealt are taken back where the ranks send over TCP.
    tcp = decide_for(fabric_nodes(), "id0", Request(FabricWish(fabric="tcp"), BOTH))["id0"]
    environ = {"NCCL_IB_HCA": "=mlx5_0"}
    export(tcp, Request(placed={"NCCL_IB_HCA": "=mlx5_0"}), environ)
    assert "NCCL_IB_HCA" not in environ


def test_on_one_machine_nothing_names_an_interface() -> None:
    settled = decide_for(fabric_nodes(1), "id0", Request(libraries=BOTH))["id0"]
    environ: dict[str, str] = {}
    export(settled, Request(), environ, several=False)
    assert not [name for name in environ if name.endswith("IFNAME")]
    assert environ["NCCL_NET"] == "IB"


def test_what_does_not_lead_to_rank_0_is_taken_out() -> None:
    settled = fall_back(decide_for(fabric_nodes(), "id0", Request(libraries=BOTH))["id0"], "it is not reached")
    assert (settled.interface, settled.notes[-1]) == (None, "it is not reached")
    assert not [value for value in settled.environment.values() if value in ("ib0", "=ib0")]


def test_interfaces_of_containers_do_not_fill_the_store() -> None:
    many = "".join(wired(10 + n, f"veth{n:07x}@if3", f"169.254.1.{n}/32") for n in range(200))
    assert list(slim(node(wired(2, "eth0", "10.0.0.1/24") + many, "n")).interfaces) == ["eth0"]


def test_what_is_left_out_of_a_node_changes_no_decision() -> None:
    more = wired(9, "docker0", "172.17.0.1/16") + wired(8, "nmn0", "10.252.0.1/17")
    vlan = wired(3, "ib0.7@ib0", "10.7.0.1/24", flags="<BROADCAST,MULTICAST>", state="DOWN")
    bridged = wired(2, "eno1", "0.0.0.0/0", more="master br0 ") + wired(3, "br0", "10.0.0.1/24")
    rails = infiniband(2, "ib0", "10.0.0.1/24") + infiniband(4, "ib1", "10.0.0.2/24")
    for text in (rails, rails + vlan, bridged, ""):
        whole = node(text + more, "n")
        less = slim(whole)
        assert len(less.interfaces) < len(whole.interfaces)
        request = Request(libraries=BOTH)
        assert decide_for({"a": less}, "a", request) == decide_for({"a": whole}, "a", request)
    down = node(wired(2, "eth0", "10.0.0.1/24") + vlan, "n")
    assert list(slim(down, "ib0.7").interfaces) == ["eth0", "ib0.7"]
