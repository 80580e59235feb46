"""Which network adapters a rank sends over: the nearest that carry the node's fabric, each under an even load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dthpc.placement.plan.places import NicChoice, Unit
from dthpc.placement.topology import LEVELS, Nic, Topology

_KINDS = ("infiniband", "slingshot", "omnipath", "efa", "roce", "ethernet")
_SLOW = 4
"""A NIC of less than a fourth of the fastest one's rate serves management, not the ranks."""


_NAMED = 16
"""Most ranks that a reason names one by one."""


@dataclass(frozen=True)
class Sender:
    """A rank that needs NICs."""

    rank: int
    units: tuple[Unit, ...]
    nodes: tuple[int, ...] | None
    """Memory nodes of its cores."""

    @property
    def name(self) -> str:
        return self.units[0].name if self.units else "its cores"


def deal_nics(
    topology: Topology, senders: Sequence[Sender], cap: int | None
) -> tuple[dict[int, tuple[tuple[NicChoice, ...], str]], list[str]]:
    """NICs of each rank with the reason, and what is worth saying of those that are not used.

    Ranks with the same nearest NICs share them evenly: several each where there are enough, else several ranks on one.
    A rank without a near NIC gets the one with the least load of those that others have near.

    Args:
        topology: of the node.
        senders: the ranks.
        cap: NICs of a rank, or `None`.
    """
    levels = {nic.name: {s.rank: _level(topology, s, nic) for s in senders} for nic in topology.nics or ()}
    fabric, notes = fabric_of(topology, levels)
    near = {sender.rank: _nearest(fabric, levels, sender.rank) for sender in senders}
    pool = [nic for nic in fabric if any(nic in nics for _, nics in near.values())] or fabric
    groups: dict[tuple[str, ...], list[Sender]] = {}
    for sender in sorted(senders, key=lambda s: (s.units[0].place if s.units else (0, "", 0), s.rank)):
        groups.setdefault(tuple(nic.name for nic in near[sender.rank][1]), []).append(sender)
    load = dict.fromkeys((nic.name for nic in fabric), 0)
    given: dict[int, tuple[tuple[NicChoice, ...], str]] = {}
    # Those with a choice wait for those without; those that have none near come last of all.
    for names, group in sorted(groups.items(), key=lambda item: len(item[0]) or len(load) + 1):
        among = [nic for nic in fabric if nic.name in names] or pool
        count = max(1, len(among) // len(group)) if names else 1
        for sender in group:
            level = near[sender.rank][0]
            chosen = sorted(among, key=lambda nic: load[nic.name])[: cap or count]
            for nic in chosen:
                load[nic.name] += 1
            choices = tuple(_choice(nic, levels[nic.name][sender.rank]) for nic in among if nic in chosen)
            why = _why(sender, level, names, chosen, group)
            given[sender.rank] = choices, "the only one" if level is None and len(fabric) == 1 else why
    return given, notes


def fabric_of(topology: Topology, levels: Mapping[str, Mapping[int, str | None]]) -> tuple[list[Nic], list[str]]:
    """The NICs that ranks may send over: of one kind, up, and not much slower than the others; and remarks.

    Args:
        topology: of the node.
        levels: how near each NIC, by name, is to each rank.
    """
    nics = list(topology.nics or ())
    real = [nic for nic in nics if nic.usable is not False]
    # A node without RDMA sends over its Ethernet adapters by TCP.
    found = real or [nic for nic in nics if nic.kind == "ethernet" and nic.up is not False and not nic.virtual]
    kinds = sorted(
        {nic.kind for nic in found if nic.kind}, key=lambda kind: _KINDS.index(kind) if kind in _KINDS else 9
    )
    if len(kinds) > 1:
        best = max(kinds, key=lambda kind: (_score([n for n in found if n.kind == kind], levels), -kinds.index(kind)))
        found = [nic for nic in found if nic.kind in (best, None)]
    fastest = max((rate_of(nic) or 0.0 for nic in found), default=0.0)
    found = [nic for nic in found if (rate_of(nic) or fastest) * _SLOW >= fastest]
    down = [nic for nic in nics if nic.up is False and nic.kind != "software" and not nic.virtual]
    notes = [f"NIC {nic.name} is down and not used" for nic in down if nic.rdma is not False]
    return found, notes


def rate_of(nic: Nic) -> float | None:
    """Highest rate of the NIC's ports that are up, in Gbit/s."""
    return max((port.rate_gbps for port in nic.ports or () if port.rate_gbps and port.up is not False), default=None)


def _score(nics: Sequence[Nic], levels: Mapping[str, Mapping[int, str | None]]) -> tuple[int, float]:
    served = {rank for nic in nics for rank, level in levels[nic.name].items() if level not in (None, "SYS")}
    return len(served), sum(rate_of(nic) or 0.0 for nic in nics)


def _level(topology: Topology, sender: Sender, nic: Nic) -> str | None:
    if sender.units:
        return topology.level(sender.units[0].gpu, nic)
    if not nic.numa or not sender.nodes:
        return None
    return "NODE" if set(nic.numa) & set(sender.nodes) else "SYS"


def _nearest(
    fabric: Sequence[Nic], levels: Mapping[str, Mapping[int, str | None]], rank: int
) -> tuple[str | None, list[Nic]]:
    known = {levels[nic.name][rank] for nic in fabric}
    best = next((level for level in LEVELS if level in known), None)
    near = [nic for nic in fabric if levels[nic.name][rank] == best]
    return best, near if best not in (None, "SYS") else []


def _choice(nic: Nic, level: str | None) -> NicChoice:
    several = len(nic.ports or ()) > 1
    up = tuple(port.number for port in nic.ports or () if port.up is not False)
    return NicChoice(nic, level, up if several else ())


def _why(
    sender: Sender, level: str | None, names: Sequence[str], chosen: Sequence[Nic], group: Sequence[Sender]
) -> str:
    if not chosen:
        return "no NIC that carries ranks is known"
    if not names:
        if level == "SYS":
            return f"none is near to {sender.name}; the one with the least load"
        return f"which is near to {sender.name} is not told; the one with the least load"
    if len(group) == 1:
        return f"{level} to {sender.name}, its own"
    ranks = sorted(s.rank for s in group)
    alike = "ranks " + ", ".join(map(str, ranks)) if len(ranks) <= _NAMED else f"{len(ranks)} ranks"
    return f"{level} to {sender.name}; {len(names)} such for {alike}"
