"""Addresses as numbers: which of them stand where, and which lies in a subnet."""

from __future__ import annotations

from dthpc.comm.fabric.offer import Card, Cards, Offer
from dthpc.comm.fabric.recognise import from_text
from dthpc.comm.fabric.wire import numbers_of
from tests.comm.fabric.texts import LO, wired


def offer(text: str, *cards: Card) -> Offer:
    (node,) = from_text(LO + text, "n")
    return Offer(Cards(cards, node.interfaces), numbers_of(node))


def test_the_first_address_is_ipv4_and_of_no_alias() -> None:
    eth = Card("eth0", 3)
    six = (
        wired(2, "eth0", "fd00::7/64")
        + "    inet 10.0.9.7/24 scope global eth0:1\n    inet 10.0.0.7/24 scope global eth0\n"
    )
    assert list(map(str, offer(six, eth).addresses(eth))) == ["10.0.0.7/24", "fd00::7/64", "10.0.9.7/24"]
    assert offer(six, eth).first(eth) == "10.0.0.7"
    assert offer(wired(2, "eth0", "169.254.0.7/16"), eth).first(eth) is None
    assert offer(wired(2, "eth0", "169.254.0.7/16"), eth).words() == ["eth0 (address not told)"]


def test_of_two_interfaces_in_one_subnet_the_name_decides_then_the_class() -> None:
    low, high = Card("eth0", 3), Card("ib0", 5)
    both = offer(wired(2, "eth0", "10.0.0.7/24") + wired(3, "ib0", "10.0.0.8/24"), low, high)
    subnet = (4, 24, 0x0A0000)
    found = [both.in_subnet(subnet, name) for name in ("eth0", "other")]
    assert [slot and slot.card for slot in found] == [low, high]
    assert both.in_subnet((4, 24, 0x0A0001), "eth0") is None
    assert both.in_subnet((4, 16, 0x0A00), "eth0") is None
    assert both.in_subnet(None, "eth0") is None


def test_a_single_hosts_prefix_is_no_subnet() -> None:
    card = Card("eth0", 3)
    lone = offer(wired(2, "eth0", "10.0.0.7/32"), card)
    (slot,) = lone.alike.slots[card]
    assert slot.lone
    assert slot.subnet(lone.numbers[slot.place]) is None
    assert lone.in_subnet((4, 32, 0x0A000007), "eth0") is None
