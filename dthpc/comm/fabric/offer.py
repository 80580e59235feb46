"""The interfaces that nodes may use, with their addresses as plain numbers: thousands of nodes are compared by them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dthpc.comm.fabric.model import IfAddress, Interface

BITS = {4: 32, 6: 128}
"""Length of an address of each version."""

Subnet = tuple[int, int, int]
"""Version, length of the prefix, and the network's bits."""


@dataclass(frozen=True, eq=False)
class Card:
    """An interface that ranks may use, without its addresses: nodes that are alike but for those share it."""

    name: str
    quality: int
    """Class of the interface."""

    routed: int = 0
    """Evidence of the routing table for it."""

    speed: float = 0.0
    """In Gbit/s; 0: not told."""


@dataclass(frozen=True, eq=False)
class Slot:
    """Where an address that others may reach stands; alike nodes differ in the number that they hold there."""

    card: Card
    place: int
    """Among all addresses of the node."""

    version: int
    prefix: int | None

    @property
    def lone(self) -> bool:
        """Whether no subnet is known: the prefix is not told, or is that of a single host."""
        return self.prefix is None or self.prefix == BITS[self.version]

    def subnet(self, number: int) -> Subnet | None:
        """The subnet of a number in this slot."""
        if self.prefix is None or self.lone:
            return None
        return self.version, self.prefix, number >> (BITS[self.version] - self.prefix)

    def address(self, number: int) -> IfAddress:
        """The address that a number in this slot is."""
        ip = ipaddress.IPv4Address(number) if self.version == 4 else ipaddress.IPv6Address(number)
        return IfAddress(ip, self.prefix)


class Cards:
    """The interfaces that alike nodes may use, and where their addresses stand."""

    def __init__(self, cards: Sequence[Card], interfaces: Mapping[str, Interface]) -> None:
        """Find the slots.

        Args:
            cards: the interfaces that may be used.
            interfaces: all of the node, whose addresses are counted in their order (`numbers_of`).
        """
        self.cards = tuple(cards)
        self.slots: dict[Card, list[Slot]] = {card: [] for card in cards}
        """Of each card, the best first."""

        self.by_prefix: dict[tuple[int, int | None], list[Slot]] = {}
        named = {card.name: card for card in cards}
        place = 0
        for name, interface in interfaces.items():
            places = {id(address): place + at for at, address in enumerate(interface.addresses)}
            place += len(places)
            for address in interface.routable if name in named else ():
                slot = Slot(named[name], places[id(address)], address.ip.version, address.prefix)
                self.slots[named[name]].append(slot)
        for slot in (slot for card in cards for slot in self.slots[card]):
            if not slot.lone:
                self.by_prefix.setdefault((slot.version, slot.prefix), []).append(slot)


@dataclass(frozen=True)
class Offer:
    """What one node may use."""

    alike: Cards
    numbers: Sequence[int]
    """Its addresses, all of them (`numbers_of`)."""

    @property
    def cards(self) -> tuple[Card, ...]:
        return self.alike.cards

    def addresses(self, card: Card) -> list[IfAddress]:
        """Those of a card that others may reach; empty where the text hides or omits them."""
        return [slot.address(self.numbers[slot.place]) for slot in self.alike.slots[card]]

    def first(self, card: Card) -> str | None:
        """The address under which the node is to be reached over a card."""
        slot = next(iter(self.alike.slots[card]), None)
        return None if slot is None else str(slot.address(self.numbers[slot.place]).ip)

    def private(self, card: Card) -> bool:
        """Whether it holds a private address: what faces the internet is seldom made to carry ranks."""
        addresses = self.addresses(card)
        return not addresses or any(address.ip.is_private for address in addresses)

    def words(self) -> list[str]:
        """Each card with its first address, for people."""
        told = [(card, next(iter(self.addresses(card)), None)) for card in self.cards]
        return [f"{card.name} {address or '(address not told)'}" for card, address in told]

    def in_subnet(self, subnet: Subnet | None, name: str) -> Slot | None:
        """The best counterpart in a subnet: of an interface of the same name, else of the best class."""
        if subnet is None:
            return None
        version, prefix, bits = subnet
        shift, numbers = BITS[version] - prefix, self.numbers
        slots = self.alike.by_prefix.get((version, prefix), ())
        found = [slot for slot in slots if numbers[slot.place] >> shift == bits]
        if len(found) > 1:
            return max(found, key=lambda slot: (slot.card.name == name, slot.card.quality))
        return found[0] if found else None
