"""Which network all nodes share: by subnet, else by name, else by addresses that are near each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dthpc.comm.fabric.classify import FABRIC, stem
from dthpc.comm.fabric.model import IfAddress, Interface, IPAddress

_LEAST_BITS = {4: 16, 6: 48}
"""Leading bits that addresses without a known prefix must share to count as one site's network."""

_CERTAIN, _LIKELY, _ROUTED = 2, 1, 0
"""How sure it is that an option connects the nodes: one subnet; prefixes unknown, addresses near; subnets differ."""


@dataclass(frozen=True)
class Candidate:
    """An interface that a node may use."""

    interface: Interface
    addresses: tuple[IfAddress, ...]
    """Those that others may reach; empty where the text hides or omits them."""

    quality: int
    """Class of the interface."""

    routed: int = 0
    """Evidence of the routing table for it."""

    @property
    def private(self) -> bool:
        """Whether it holds a private address: what faces the internet is seldom made to carry ranks."""
        return not self.addresses or any(address.ip.is_private for address in self.addresses)

    def __str__(self) -> str:
        return f"{self.interface.name} {self.addresses[0] if self.addresses else '(address not told)'}"


@dataclass(frozen=True)
class Option:
    """One way to connect all nodes: an interface and address of each."""

    taken: Mapping[str, tuple[Candidate, IfAddress]]
    certainty: int
    bits: int
    """Leading bits that all addresses share."""

    what: str

    @property
    def quality(self) -> int:
        return min(candidate.quality for candidate, _ in self.taken.values())

    @property
    def speed(self) -> float:
        return min(candidate.interface.speed_gbps or 0.0 for candidate, _ in self.taken.values())

    @property
    def private(self) -> bool:
        ips = (address.ip for _, address in self.taken.values())
        return next(ips).is_private if self.certainty == _CERTAIN else all(ip.is_private for ip in ips)

    @property
    def routed(self) -> int:
        return min(candidate.routed for candidate, _ in self.taken.values())


@dataclass(frozen=True)
class Agreement:
    """What came of it."""

    reason: str
    taken: Mapping[str, Candidate] = field(default_factory=dict)
    """Of each node; empty where the nodes share no network."""

    rails: Mapping[str, list[Candidate]] = field(default_factory=dict)
    """All interfaces of each node in the high-speed network, of which the first is the one taken."""

    single: Mapping[str, Candidate] = field(default_factory=dict)
    """Best candidate of each node by itself, for nodes that are looked at alone or next to one that has none."""


def agree(candidates: Mapping[str, Sequence[Candidate]]) -> Agreement:
    """Find the network that all nodes share.

    Args:
        candidates: of each node, in the order of its interfaces.
    """
    with_some = {name: each for name, each in candidates.items() if each}
    told = all(any(candidate.addresses for candidate in each) for each in candidates.values())
    if not told or len(candidates) == 1:
        rails = {name: _siblings(max(each, key=_alone), each) for name, each in with_some.items()}
        first = {name: each[0] for name, each in rails.items()}
        return Agreement("the best interface that the node has", first if len(candidates) == 1 else {}, rails, first)
    options = [option for option in _options(candidates) if option.certainty > _ROUTED or _names(option) == 1]
    if not options:
        return Agreement("the nodes share no network")
    best = max(options, key=_order)
    alike = [
        o for o in options if (o.certainty, o.quality) == (best.certainty, best.quality) and best.quality == FABRIC
    ]
    rails = {}
    for name, (chosen, _) in best.taken.items():
        every = [chosen, *(option.taken[name][0] for option in alike)]
        rails[name] = _siblings(chosen, list({c.interface.name: c for c in every}.values()))
    # Of several rails of one network the first, on every node.
    one = best.certainty == _CERTAIN and best.quality == FABRIC
    taken = {name: rails[name][0] if one else chosen for name, (chosen, _) in best.taken.items()}
    rails = {name: _first(taken[name], each) for name, each in rails.items()}
    return Agreement(best.what, taken, rails)


def _order(option: Option) -> tuple[float, ...]:
    names = _names(option)
    bits = option.bits if option.certainty == _LIKELY else 0
    return option.certainty, option.quality, bits, option.private, option.routed, option.speed, -names


def _names(option: Option) -> int:
    return len({candidate.interface.name for candidate, _ in option.taken.values()})


def _alone(candidate: Candidate) -> tuple[float, ...]:
    speed = candidate.interface.speed_gbps or 0.0
    return candidate.routed == 2, candidate.quality, candidate.private, candidate.routed, speed


def _options(candidates: Mapping[str, Sequence[Candidate]]) -> Iterator[Option]:
    first, *others = candidates
    held = {node: _by_subnet(candidates[node]) for node in others}
    seen: set[tuple[tuple[str, int], ...]] = set()
    for candidate in candidates[first]:
        for address in candidate.addresses:
            taken = {first: (candidate, address)}
            for node in others:
                match = _match(candidate, address, candidates[node], held[node])
                if match is None:
                    break
                taken[node] = match
            key = tuple((c.interface.name, int(a.ip)) for c, a in taken.values())
            if len(taken) == len(candidates) and key not in seen and _distinct(taken):
                seen.add(key)
                yield _option(taken)


_Held = tuple[Candidate, IfAddress]


def _by_subnet(candidates: Sequence[Candidate]) -> dict[tuple[int, int, int] | None, list[_Held]]:
    held: dict[tuple[int, int, int] | None, list[_Held]] = {}
    for candidate in candidates:
        for address in candidate.addresses:
            held.setdefault(address.subnet, []).append((candidate, address))
    return held


def _match(
    candidate: Candidate,
    address: IfAddress,
    others: Sequence[Candidate],
    held: Mapping[tuple[int, int, int] | None, list[_Held]],
) -> _Held | None:
    """The other node's best counterpart: in the same subnet, else of the same name, else near."""
    if address.subnet is not None and (certain := held.get(address.subnet)):
        name = candidate.interface.name
        if len(certain) == 1:
            return certain[0]
        return max(certain, key=lambda each: (each[0].interface.name == name, each[0].quality))
    best: tuple[tuple[int, ...], tuple[Candidate, IfAddress]] | None = None
    for other in others:
        for theirs in other.addresses:
            if theirs.ip.version != address.ip.version:
                continue
            bits = _shared([address.ip, theirs.ip])
            certainty = _certainty(address, theirs, bits)
            same = other.interface.name == candidate.interface.name
            if certainty < 0 or (certainty == _ROUTED and not same):
                continue
            score = (certainty, int(same), other.quality, bits if certainty == _LIKELY else 0)
            if best is None or score > best[0]:
                best = score, (other, theirs)
    return None if best is None else best[1]


def _certainty(a: IfAddress, b: IfAddress, bits: int) -> int:
    one, other = a.subnet, b.subnet
    if one is not None and other is not None:
        return _CERTAIN if one == other else _ROUTED
    if one is not None or other is not None:
        # One is a host's own address, or its prefix is not told: it may lie in the other's subnet.
        prefix = (one or other or (0, 0, 0))[1]
        return _LIKELY if bits >= prefix else _ROUTED
    if a.prefix is not None or b.prefix is not None:  # /32 and /128: routed host addresses
        return _LIKELY if bits >= _LEAST_BITS[a.ip.version] else _ROUTED
    return _LIKELY if bits >= _LEAST_BITS[a.ip.version] else -1


def _distinct(taken: Mapping[str, tuple[Candidate, IfAddress]]) -> bool:
    """Whether no two nodes hold the same address, as container bridges do."""
    held = [int(address.ip) for _, address in taken.values()]
    return len(set(held)) == len(held)


def _option(taken: Mapping[str, tuple[Candidate, IfAddress]]) -> Option:
    addresses = [address for _, address in taken.values()]
    bits = _shared([address.ip for address in addresses])
    certainty = min(_certainty(addresses[0], other, bits) for other in addresses[1:])
    if certainty == _CERTAIN:
        what = f"all nodes are in {addresses[0].network}"
    elif certainty == _LIKELY:
        what = f"the nodes' addresses share their first {bits} bits, and prefixes are not told"
    else:
        name = next(iter(taken.values()))[0].interface.name
        what = f"all nodes have {name}; its subnets differ, so that they must be routed"
    return Option(taken, certainty, bits, what)


def _shared(ips: Sequence[IPAddress]) -> int:
    """Leading bits that addresses of one version have in common."""
    differing = 0
    for ip in ips[1:]:
        differing |= int(ip) ^ int(ips[0])
    return ips[0].max_prefixlen - differing.bit_length()


def _siblings(chosen: Candidate, among: Sequence[Candidate]) -> list[Candidate]:
    """The candidate with those of the same kind of name, in the order of their numbers; high-speed networks only."""
    if chosen.quality != FABRIC:
        return [chosen]
    alike = [each for each in among if each.quality == FABRIC and _kin(each.interface.name, chosen.interface.name)]
    return _natural(alike or [chosen])


def _kin(a: str, b: str) -> bool:
    return (stem(a) == stem(b) and "." not in a and "." not in b) or a == b


def _natural(candidates: Sequence[Candidate]) -> list[Candidate]:
    def key(candidate: Candidate) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", candidate.interface.name)
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    return sorted(candidates, key=key)


def _first(chosen: Candidate, rails: Sequence[Candidate]) -> list[Candidate]:
    return [chosen, *(rail for rail in rails if rail.interface.name != chosen.interface.name)]
