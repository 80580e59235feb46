"""Interfaces of NetworkManager and of tables of counters."""

from __future__ import annotations

from dthpc.comm.fabric.decide import decide
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.recognise import from_text


def one(text: str) -> NodeNetwork:
    [node] = from_text(text, "n")
    return node


def choice(text: str) -> str | None:
    return decide({"n": one(text)}).nodes["n"].interface


BLOCKS = """\
eth7: connected to lan
        "a card"
        ethernet (drv), 02:00:00:00:00:01, hw, mtu 1500
        inet4 10.7.0.2/24

br-aaaaaaaaaaaa: connected (externally) to bridge
        bridge, 02:00:00:00:00:02, sw, mtu 1500
        inet4 172.19.0.1/16

eth8: unavailable
        ethernet (drv), 02:00:00:00:00:03, hw, mtu 1500
"""
FIELDS = """\
GENERAL.DEVICE:      eth7
GENERAL.TYPE:        ethernet
GENERAL.STATE:       100 (connected)
IP4.ADDRESS[1]:      10.7.0.2/24
GENERAL.DEVICE:      eth8
GENERAL.STATE:       30 (disconnected)
IP4.ADDRESS[1]:      10.8.0.2/24
"""


def test_devices_of_network_manager_in_blocks_and_fields() -> None:
    for text in (BLOCKS, FIELDS):
        node = one(text)
        assert str(node.interfaces["eth7"].ipv4[0]) == "10.7.0.2/24"
        assert (node.interfaces["eth7"].up, node.interfaces["eth8"].up) == (True, False)
        assert choice(text) == "eth7"


def test_a_list_without_addresses_gives_only_what_is_alone_in_its_class() -> None:
    rows = "eth0 ethernet connected a\nib0 infiniband connected b\nlo loopback unmanaged --\n"
    assert one(rows).interfaces["ib0"].link == "infiniband"
    assert choice(rows) == "ib0"
    two = rows.replace("ib0 infiniband", "eth1 ethernet")
    plan = decide({"n": one(two)}).nodes["n"]
    assert plan.interface is None
    assert plan.advice is not None
    assert "eth0, eth1" in plan.advice


def test_letters_of_the_table_of_counters() -> None:
    text = (
        "Iface MTU RX-OK RX-ERR RX-DRP RX-OVR TX-OK TX-ERR TX-DRP TX-OVR Flg\n"
        "eth0 1500 5 0 0 0 5 0 0 0 BMsRU\neth1 1500 0 0 0 0 0 0 0 0 BMU\nbond0 1500 5 0 0 0 5 0 0 0 BMmRU\n"
        "lo 65536 5 0 0 0 5 0 0 0 LRU\n"
    )
    node = one(text)
    assert node.interfaces["eth0"].flags == ("BROADCAST", "MULTICAST", "SLAVE", "RUNNING", "UP")
    assert node.interfaces["eth1"].up is False
    assert choice(text) == "bond0"


def test_networkctl_tells_of_carriers() -> None:
    rows = "IDX LINK TYPE OPERATIONAL SETUP\n  1 lo loopback carrier unmanaged\n  2 eth0 ether routable configured\n"
    node = one(rows + "  3 eth1 ether no-carrier configuring\n")
    assert {name: each.up for name, each in node.interfaces.items()} == {"lo": True, "eth0": True, "eth1": False}
