"""Which network all nodes share: by subnet, else by name, else by addresses that are near each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dthpc.comm.fabric.classify import FABRIC, stem
from dthpc.comm.fabric.offer import BITS, Card, Offer, Slot

_LEAST_BITS = {4: 16, 6: 48}
"""Leading bits that addresses without a known prefix must share to count as one site's network."""

_CERTAIN, _LIKELY, _ROUTED = 2, 1, 0
"""How sure it is that an option connects the nodes: one subnet; prefixes unknown, addresses near; subnets differ."""


@dataclass(frozen=True)
class Option:
    """One way to connect all nodes: an address of each, in their order."""

    slots: Sequence[Slot]
    numbers: Sequence[int]
    certainty: int
    bits: int
    """Leading bits that all addresses share; counted where the subnets are not known to be one."""

    what: str

    @cached_property
    def cards(self) -> set[Card]:
        return {slot.card for slot in self.slots}

    @property
    def quality(self) -> int:
        return min(card.quality for card in self.cards)

    @property
    def speed(self) -> float:
        return min(card.speed for card in self.cards)

    @property
    def private(self) -> bool:
        told = zip(self.slots, self.numbers, strict=True)
        ips = (slot.address(number).ip for slot, number in told)
        return next(ips).is_private if self.certainty == _CERTAIN else all(ip.is_private for ip in ips)

    @property
    def routed(self) -> int:
        return min(card.routed for card in self.cards)

    @property
    def names(self) -> int:
        """How many names the interface has over all nodes."""
        return len({card.name for card in self.cards})


@dataclass(frozen=True)
class Agreement:
    """What came of it."""

    reason: str
    taken: Mapping[str, Card] = field(default_factory=dict)
    """Of each node; empty where the nodes share no network."""

    rails: Mapping[str, Sequence[Card]] = field(default_factory=dict)
    """All interfaces of each node in the high-speed network, of which the first is the one taken."""

    single: Mapping[str, Card] = field(default_factory=dict)
    """Best interface of each node by itself, for nodes that are looked at alone or next to one that has none."""


def agree(offers: Mapping[str, Offer]) -> Agreement:
    """Find the network that all nodes share.

    Args:
        offers: of each node.
    """
    told = all(any(offer.alike.slots.values()) for offer in offers.values())
    if not told or len(offers) == 1:
        rails = {name: _alone(offer) for name, offer in offers.items() if offer.cards}
        first = {name: each[0] for name, each in rails.items()}
        return Agreement("the best interface that the node has", first if len(offers) == 1 else {}, rails, first)
    options = [option for option in _options(list(offers.values())) if option.certainty > _ROUTED or option.names == 1]
    if not options:
        return Agreement("the nodes share no network")
    best = max(options, key=_order)
    alike = [
        o for o in options if (o.certainty, o.quality) == (best.certainty, best.quality) and best.quality == FABRIC
    ]
    # Of several rails of one network the first, on every node.
    one = best.certainty == _CERTAIN and best.quality == FABRIC
    found: dict[tuple[Card, ...], list[Card]] = {}
    shared: dict[str, Sequence[Card]] = {}
    for name, *slots in zip(offers, best.slots, *(option.slots for option in alike), strict=True):
        cards = tuple([slot.card for slot in slots])
        if cards not in found:
            found[cards] = _rails(cards, chosen_first=not one)
        shared[name] = found[cards]
    return Agreement(best.what, {name: each[0] for name, each in shared.items()}, shared)


def _order(option: Option) -> tuple[float, ...]:
    bits = option.bits if option.certainty == _LIKELY else 0
    return option.certainty, option.quality, bits, option.private, option.routed, option.speed, -option.names


def _alone(offer: Offer) -> list[Card]:
    """The best interface of a node by itself, and its rails."""

    def order(card: Card) -> tuple[float, ...]:
        return card.routed == 2, card.quality, offer.private(card), card.routed, card.speed

    return _rails([max(offer.cards, key=order), *offer.cards])


def _options(offers: Sequence[Offer]) -> Iterator[Option]:
    first, *others = offers
    for slot in (slot for card in first.cards for slot in first.alike.slots[card]):
        number = first.numbers[slot.place]
        subnet, certain = slot.subnet(number), True
        slots = [slot]
        for offer in others:
            match = offer.in_subnet(subnet, slot.card.name)
            if match is None:
                certain = False
                match = _near(offer, slot, number)
            if match is None:
                break
            slots.append(match)
        if len(slots) < len(offers):
            continue
        numbers = [offer.numbers[each.place] for offer, each in zip(offers, slots, strict=True)]
        # Container bridges hold the same address on several nodes.
        if len(set(numbers)) == len(numbers):
            yield _option(slots, numbers, certain)


def _near(offer: Offer, slot: Slot, number: int) -> Slot | None:
    """A node's best counterpart where none is in the same subnet: near, or of the same name."""
    best: tuple[tuple[int, ...], Slot] | None = None
    for their in (their for slots in offer.alike.slots.values() for their in slots):
        same = their.card.name == slot.card.name
        if their.version != slot.version or not (same or slot.lone or their.lone):
            continue
        if slot.lone or their.lone:
            theirs = offer.numbers[their.place]
            bits = _shared([number, theirs], slot.version)
            certainty = _certainty(slot, number, their, theirs, bits)
        else:
            bits, certainty = 0, _ROUTED  # the same subnet was looked for already
        if certainty < 0 or (certainty == _ROUTED and not same):
            continue
        score = (certainty, int(same), their.card.quality, bits if certainty == _LIKELY else 0)
        if best is None or score > best[0]:
            best = score, their
    return None if best is None else best[1]


def _certainty(a: Slot, number: int, b: Slot, other: int, bits: int) -> int:
    """How sure it is that two addresses, which share their first `bits` bits, reach each other; -1: they do not."""
    one, another = a.subnet(number), b.subnet(other)
    if one is not None and another is not None:
        return _CERTAIN if one == another else _ROUTED
    if one is not None or another is not None:
        # One is a host's own address, or its prefix is not told: it may lie in the other's subnet.
        prefix = (one or another or (0, 0, 0))[1]
        return _LIKELY if bits >= prefix else _ROUTED
    if a.prefix is not None or b.prefix is not None:  # /32 and /128: routed host addresses
        return _LIKELY if bits >= _LEAST_BITS[a.version] else _ROUTED
    return _LIKELY if bits >= _LEAST_BITS[a.version] else -1


def _option(slots: Sequence[Slot], numbers: Sequence[int], certain: bool) -> Option:
    if certain:
        what = f"all nodes are in {slots[0].address(numbers[0]).network}"
        return Option(slots, numbers, _CERTAIN, 0, what)
    bits, certainty = 0, _ROUTED
    if any(slot.lone for slot in set(slots)):
        bits = _shared(numbers, slots[0].version)
        others = zip(slots[1:], numbers[1:], strict=True)
        certainty = min(_certainty(slots[0], numbers[0], slot, number, bits) for slot, number in others)
    if certainty == _LIKELY:
        what = f"the nodes' addresses share their first {bits} bits, and prefixes are not told"
    else:
        what = f"all nodes have {slots[0].card.name}; its subnets differ, so that they must be routed"
    return Option(slots, numbers, certainty, bits, what)


def _shared(numbers: Sequence[int], version: int) -> int:
    """Leading bits that addresses have in common."""
    differing = 0
    for number in numbers:
        differing |= number ^ numbers[0]
    return BITS[version] - differing.bit_length()


def _rails(cards: Sequence[Card], chosen_first: bool = False) -> list[Card]:
    """The rails of the first card's network, by their numbers, each name once; high-speed networks have several.

    Args:
        cards: the one chosen, and others (itself may be among them).
        chosen_first: whether it comes first, rather than at its number.
    """
    if cards[0].quality != FABRIC:
        return [cards[0]]
    named = {card.name: card for card in cards}
    rails = [card for card in named.values() if card.quality == FABRIC and _kin(card, cards[0])]
    rails.sort(key=lambda card: _natural(card.name))
    return sorted(rails, key=lambda card: chosen_first and card.name != cards[0].name)


def _kin(a: Card, b: Card) -> bool:
    return (stem(a.name) == stem(b.name) and "." not in a.name and "." not in b.name) or a.name == b.name


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
