"""Which interface each node takes, and what is never taken, whatever the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dthpc.comm.fabric.decide import FabricPlan, FabricWish, decide
from dthpc.comm.fabric.recognise import from_text
from tests.comm.fabric.texts import ETHER, LO, ifconfig, infiniband, link, wired

MASTER = "<BROADCAST,MULTICAST,MASTER,UP,LOWER_UP>"
SLAVE = "<BROADCAST,MULTICAST,SLAVE,UP,LOWER_UP>"


def plan_of(*texts: str, wish: FabricWish | None = None, exported: dict[str, str] | None = None) -> FabricPlan:
    nodes = [node for number, text in enumerate(texts) for node in from_text(text, f"n{number}")]
    return decide({node.name: node for node in nodes}, wish, exported)


def taken(plan: FabricPlan) -> list[str | None]:
    return [choice.interface for choice in plan.nodes.values()]


BONDED = link(2, "eth0", ETHER, flags=SLAVE, more="master bond0 ")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (wired(2, "docker0", "172.17.0.1/16") + wired(3, "eth0", "172.17.24.5/24"), "eth0"),
        (wired(2, "br-0123456789ab", "172.18.0.1/16") + wired(3, "eth0", "10.0.0.1/24"), "eth0"),
        (wired(2, "cali0123456789a@if4", "10.0.0.9/32") + wired(3, "flannel.1", "10.1.0.0/32"), None),
        (
            wired(2, "tunl0@NONE", "10.0.0.9/32")
            + wired(3, "wg0", "10.1.0.1/24")
            + wired(4, "zt5u4y6ejv", "10.2.0.1/24"),
            None,
        ),
        (wired(2, "nmn0", "10.252.0.1/17") + wired(3, "hsn0", "10.253.0.1/16"), "hsn0"),
        (wired(2, "idrac", "10.0.0.1/24") + wired(3, "usb0", "169.254.3.1/16"), None),
        (wired(2, "eth0", "10.0.0.1/24") + infiniband(3, "ib0", "10.1.0.1/16"), "ib0"),
        (wired(2, "wlp3s0", "10.0.0.1/24") + wired(3, "enp2s0", "10.0.0.2/24"), "enp2s0"),
        (
            link(2, "eth0", ETHER, flags="<NO-CARRIER,BROADCAST,UP>", state="DOWN") + wired(3, "eth1", "10.0.0.1/8"),
            "eth1",
        ),
        (BONDED + wired(3, "bond0", "10.0.0.1/24", flags=MASTER) + wired(4, "bond0.7@bond0", "10.7.0.1/24"), "bond0"),
        (BONDED + link(3, "bond0", ETHER, flags=MASTER) + wired(4, "bond0.7@bond0", "10.7.0.1/24"), "bond0.7"),
        (BONDED, None),
        (link(2, "eno1", ETHER, more="master br0 ") + wired(3, "br0", "10.0.0.1/24"), "br0"),
        (link(2, "eno1", ETHER, more="master ovs-system ") + wired(3, "br-ex", "10.0.0.1/24"), "br-ex"),
        (link(2, "vnet0", ETHER, more="master br0 ") + wired(3, "br0", "10.0.0.1/24"), None),
        (wired(2, "eth0@if9", "10.244.0.7/24"), "eth0"),
        (wired(2, "enp0s31f6", "203.0.113.3/32"), "enp0s31f6"),
        (wired(2, "eno49", "8.8.4.4/21") + wired(3, "ens1f1", "192.168.6.1/24"), "ens1f1"),
        (wired(2, "veth0@if9", "10.244.0.7/24"), "veth0"),
        (wired(2, "veth0a1b2c3@if9", "10.244.0.7/24") + wired(3, "gke0123456789a@if2", "10.4.0.1/32"), None),
        (wired(2, "loopback0", "10.255.0.1/32") + wired(3, "eth2", "10.0.0.1/24"), "eth2"),
    ],
)
def test_the_right_interface_of_one_node(text: str, name: str | None) -> None:
    plan = plan_of(LO + text)
    assert taken(plan) == [name]
    environment = next(iter(plan.nodes.values())).environment
    assert environment.get("GLOO_SOCKET_IFNAME") == name
    assert environment.get("NCCL_SOCKET_IFNAME") == (f"={name}" if name else None)
    assert bool(plan.errors) == (name is None)


def test_ports_of_a_bond_that_is_not_in_the_text_are_not_taken_and_the_bond_is_named() -> None:
    choice = plan_of(LO + BONDED).nodes["n0"]
    assert choice.reason == "eth0 are ports of bond0, which is not in this text"
    assert choice.advice is not None
    assert choice.advice.startswith("bond0")
    old = ifconfig("eth0", "10.0.0.1", "6211<UP,BROADCAST,RUNNING,SLAVE,MULTICAST>")
    assert taken(plan_of(old)) == [None]


def test_rails_of_one_network_are_a_prefix_where_nothing_else_begins_so() -> None:
    rails = "".join(wired(2 + n, f"hsn{n}", f"10.9.{n}.1/15") for n in range(4))
    choice = plan_of(LO + rails).nodes["n0"]
    assert (choice.interface, choice.environment["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
    vlan = plan_of(LO + rails + wired(9, "hsn0.7@hsn0", "10.77.0.1/24")).nodes["n0"]
    assert vlan.environment["NCCL_SOCKET_IFNAME"] == "=hsn0,hsn1,hsn2,hsn3"


def test_nodes_take_the_network_that_they_share_under_whatever_name() -> None:
    common = plan_of(
        LO + wired(2, "ens6", "10.1.0.1/24") + infiniband(3, "ib0", "10.9.0.1/24"),
        LO + wired(2, "ens9", "10.2.0.2/24") + infiniband(3, "ib0", "10.9.0.2/24"),
    )
    assert taken(common) == ["ib0", "ib0"]
    other = plan_of(LO + wired(2, "eno1", "10.1.0.1/16"), LO + wired(2, "ens3", "10.1.9.2/16"))
    assert taken(other) == ["eno1", "ens3"]
    assert [c.environment["NCCL_SOCKET_IFNAME"] for c in other.nodes.values()] == ["=eno1", "=ens3"]
    routed = plan_of(LO + wired(2, "eth0", "10.1.0.1/24"), LO + wired(2, "eth0", "10.2.0.1/24"))
    assert taken(routed) == ["eth0", "eth0"]
    assert "routed" in routed.nodes["n0"].reason


def test_an_address_that_two_nodes_hold_connects_none() -> None:
    same = wired(2, "aaa0", "192.168.122.1/24")
    plan = plan_of(LO + same + wired(3, "eth0", "10.0.0.1/24"), LO + same + wired(3, "eth0", "10.0.0.2/24"))
    assert taken(plan) == ["eth0", "eth0"]
    assert taken(plan_of(LO + same, LO + same)) == [None, None]


def test_nodes_that_share_nothing_are_refused_with_the_difference() -> None:
    plan = plan_of(LO + wired(2, "eno1", "10.1.0.1/24"), LO + wired(2, "ens3", "10.2.0.1/24"))
    (problem,) = plan.errors
    assert problem.what == "the nodes have no network in common"
    assert problem.why == "n0: eno1 10.1.0.1/24; n1: ens3 10.2.0.1/24"


def test_without_prefixes_the_nearest_addresses_count() -> None:
    log = (
        "a: x0:10.0.26.1<0> y0:172.16.0.1<0> docker0:172.17.0.1<0>\n"
        "b: x0:10.0.28.1<0> y0:172.16.0.2<0> docker0:172.17.0.1<0>\n"
    )
    assert taken(plan_of(log)) == ["y0", "y0"]


def test_the_route_to_the_leader_decides_between_equals() -> None:
    text = LO + wired(2, "eth0", "10.0.0.1/24") + wired(3, "eth1", "10.1.0.1/24")
    assert taken(plan_of(text + "10.1.0.9 dev eth1 src 10.1.0.1 uid 0\n")) == ["eth1"]
    assert taken(plan_of(text + "default via 10.1.0.254 dev eth1\n")) == ["eth1"]


def test_what_the_user_exported_stays_and_is_reported() -> None:
    text = LO + wired(2, "eth0", "10.0.0.1/24") + wired(3, "eth1", "10.1.0.1/24")
    plan = plan_of(text, exported={"GLOO_SOCKET_IFNAME": "eth1"})
    assert plan.nodes["n0"].kept == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert "GLOO_SOCKET_IFNAME" not in plan.nodes["n0"].environment
    assert not plan.errors


def test_a_wished_interface_is_taken_or_refused_with_the_nearest_name() -> None:
    text = LO + wired(2, "eth0", "10.0.0.1/24") + wired(3, "eth1", "10.1.0.1/24") + wired(4, "docker0", "172.17.0.1/16")
    assert taken(plan_of(text, wish=FabricWish("eth1"))) == ["eth1"]
    assert "did you mean eth" in plan_of(text, wish=FabricWish("ehh1")).errors[0].fix
    assert "container" in plan_of(text, wish=FabricWish("docker0")).errors[0].why


CARDS = "mlx5_0 port 1 ==> ib0 (Up)\nmlx5_1 port 1 ==> ib1 (Up)\n"
STAT = """\
CA 'mlx5_0'
    Port 1:
        State: {state}
        Physical state: LinkUp
        Rate: 200
        Link layer: InfiniBand
"""


def test_devices_are_translated_for_each_library() -> None:
    plan = plan_of(LO + infiniband(2, "ib0", "10.0.0.1/24") + STAT.format(state="Active"))
    environment = plan.nodes["n0"].environment
    assert plan.fabric == "infiniband"
    assert (environment["NCCL_IB_HCA"], environment["UCX_NET_DEVICES"]) == ("=mlx5_0", "mlx5_0:1")
    plain = plan_of(LO + wired(2, "eth0", "10.0.0.1/24")).nodes["n0"].environment
    assert plain["UCX_NET_DEVICES"] == plain["FI_TCP_IFACE"] == plain["OMPI_MCA_btl_tcp_if_include"] == "eth0"


def test_a_node_without_the_others_fabric_is_named_with_the_reason() -> None:
    good = [LO + infiniband(2, "ib0", f"10.0.0.{n}/24") + STAT.format(state="Active") for n in (1, 2)]
    plan = plan_of(*good, LO + infiniband(2, "ib0", "10.0.0.3/24") + STAT.format(state="Down"))
    (problem,) = plan.errors
    assert problem.what == "n2 has no usable infiniband"
    assert "mlx5_0: no port is active" in problem.why


def test_a_wished_fabric_that_is_not_there_is_refused() -> None:
    plan = plan_of(LO + wired(2, "eth0", "10.0.0.1/24"), wish=FabricWish(fabric="slingshot"))
    assert [problem.setting for problem in plan.errors] == ["comm.fabric"]
    assert not plan_of(LO + wired(2, "eth0", "10.0.0.1/24"), wish=FabricWish(fabric="tcp")).errors


NEVER = ["docker0", "veth0a1b2c3", "virbr0", "cni0", "tun0", "tunl0", "flannel.1", "nmn0", "bmc0", "dummy0", "lo"]


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.sampled_from(["eth0", "ens3", "ib0", "hsn0", *NEVER]), min_size=1, max_size=8, unique=True),
    hosts=st.integers(min_value=1, max_value=3),
)
def test_nothing_that_must_not_carry_ranks_is_ever_taken(names: list[str], hosts: int) -> None:
    texts = [
        "".join(wired(2 + n, name, f"10.{n}.0.{host}/16") for n, name in enumerate(names))
        for host in range(1, hosts + 1)
    ]
    plan = plan_of(*texts)
    usable = [name for name in names if name not in NEVER]
    for name, choice in zip(taken(plan), plan.nodes.values(), strict=True):
        assert (name in usable) if usable else (name is None)
        assert not set(choice.rails) & set(NEVER)
    assert len(set(taken(plan))) == 1


def test_of_equals_what_a_partition_stands_on_is_taken() -> None:
    child, parent = infiniband(3, "ib0.8001@ib0", "10.1.0.4/16"), infiniband(2, "ib0", "10.0.0.4/16")
    assert taken(plan_of(LO + child + parent)) == ["ib0"]
