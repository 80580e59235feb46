"""What nodes tell rank 0 comes out as it went in, and alike nodes are known for it."""

from __future__ import annotations

import json

import pytest

from dthpc.comm.fabric.decide import FabricWish, decide
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.recognise import from_text
from dthpc.comm.fabric.wire import likeness, numbers_of, pack, unpack
from tests.comm.fabric.texts import ETHER, LO, inet, infiniband, link, wired

LOG = "n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>\n"
ALIAS = wired(4, "eth1", "10.9.0.1/24", more="") + "    inet 10.9.1.1/24 scope global secondary eth1:1\n"


def one(text: str, name: str = "n") -> NodeNetwork:
    (node,) = from_text(text, name)
    return node


def rails(number: int) -> NodeNetwork:
    every = "".join(infiniband(2 + rail, f"ib{rail}", f"10.{rail}.0.{number}/24") for rail in range(2))
    return one(LO + every + wired(9, "eth0", f"fd00::{number:x}/64"), f"n{number}")


@pytest.mark.parametrize(
    "text",
    [
        LO
        + link(2, "eth0", ETHER, inet("10.0.0.1/24", "eth0"), "altname enp1s0")
        + wired(3, "tun0@NONE", "10.8.0.1/32"),
        LO + ALIAS,
        LOG,
        "default via 10.0.0.1 dev eth0\n",
        json.dumps({"eth0": {"addr": "10.0.0.x", "state": "UP"}}),
        "mlx5_0 port 1 (ACTIVE) ==> ib0 (Up)\nNCCL_IB_HCA=mlx5_0\n",
    ],
)
def test_what_was_read_comes_out_again(text: str) -> None:
    for node in from_text(text, "n"):
        (found,) = unpack([pack(node)])
        assert found == node
        assert list(found.interfaces) == list(node.interfaces)
        assert numbers_of(found) == numbers_of(node)
        assert "eth7" not in found.interfaces


def test_nodes_that_differ_in_addresses_alone_are_alike_and_no_others() -> None:
    first, second = unpack([pack(rails(1)), pack(rails(2))])
    assert likeness(first) == likeness(second)
    other_prefix = one(LO + infiniband(2, "ib0", "10.0.0.3/16"), "a")
    unreachable = one(LO + infiniband(2, "ib0", "169.254.0.3/16"), "b")
    reachable = one(LO + infiniband(2, "ib0", "10.0.0.4/16"), "c")
    kinds = [likeness(node) for node in unpack(map(pack, [other_prefix, unreachable, reachable]))]
    assert [kinds[0] == kinds[1], kinds[0] == kinds[2]] == [False, True]


@pytest.mark.parametrize("wish", [FabricWish(), FabricWish("ib1"), FabricWish("ib7")])
@pytest.mark.parametrize("settings", [{}, {"NCCL_SOCKET_IFNAME": "eth9"}, {"GLOO_SOCKET_IFNAME": "10.0.0.1"}])
def test_the_decision_over_the_wire_is_that_of_the_nodes_themselves(wish: FabricWish, settings: dict[str, str]) -> None:
    nodes = [rails(number) for number in range(1, 6)]
    plain = decide({node.name: node for node in nodes}, wish, settings)
    told = decide({node.name: node for node in unpack(map(pack, nodes))}, wish, settings)
    assert told == plain
    assert bool(plain.problems) == bool(settings or wish.interface == "ib7")


def test_each_node_has_its_own_address_and_is_named_in_what_is_wrong_there() -> None:
    plan = decide({n.name: n for n in unpack(map(pack, [rails(1), rails(2)]))}, None, {"GLOO_SOCKET_IFNAME": "ib"})
    assert [choice.address for choice in plan.nodes.values()] == ["10.0.0.1", "10.0.0.2"]
    assert [problem.node for problem in plan.problems] == ["n1", "n2"]
