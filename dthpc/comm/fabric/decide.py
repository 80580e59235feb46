"""The one decision: which interface and devices each node's ranks use, alike on all nodes, and what says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dthpc.comm.fabric.agree import Agreement, Candidate, agree
from dthpc.comm.fabric.classify import class_of, is_untold, why_not
from dthpc.comm.fabric.devices import DeviceChoice, choose_devices, same_fabric
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.settings import ONE_NAME, PREFIXES, Problem, check_settings
from dthpc.comm.fabric.translate import translate
from dthpc.errors import nearest

NOTHING_IN_COMMON = "the nodes have no network in common"
"""The problem of nodes that each have an interface, and none that leads to the others."""


@dataclass(frozen=True)
class FabricWish:
    """What the configuration asks for."""

    interface: str | None = None
    """Name of the interface on every node; `None`: decide."""

    fabric: str = "auto"
    """One of `dthpc.comm.fabric.devices.FABRICS`, or `auto`."""


@dataclass(frozen=True)
class NodeChoice:
    """What one node's ranks use."""

    interface: str | None
    """For Gloo, and for whatever takes one name; `None`: nothing in what is known can be used."""

    reason: str
    rails: tuple[str, ...] = ()
    """All interfaces of that network, for NCCL's sockets."""

    address: str | None = None
    devices: tuple[str, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Interfaces and devices that are not used, with the reason."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for its ranks."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """What the user exported and therefore stays."""

    advice: str | None = None
    """What is likely, and why, where it can't be told for certain."""

    def to_json(self) -> dict[str, Any]:
        return {
            "interface": self.interface,
            "reason": self.reason,
            "rails": list(self.rails),
            "address": self.address,
            "devices": list(self.devices),
            "rejected": dict(self.rejected),
            "environment": dict(self.environment),
            "kept": dict(self.kept),
            "advice": self.advice,
        }


@dataclass(frozen=True)
class FabricPlan:
    """The decision for all nodes."""

    fabric: str
    """`infiniband`, `roce`, `slingshot`, `efa`, `omnipath` or `tcp`."""

    reason: str
    nodes: Mapping[str, NodeChoice]
    problems: tuple[Problem, ...] = ()

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        return {
            "fabric": self.fabric,
            "reason": self.reason,
            "nodes": {name: choice.to_json() for name, choice in self.nodes.items()},
            "problems": [problem.to_json() for problem in self.problems],
        }


def decide(
    nodes: Mapping[str, NodeNetwork], wish: FabricWish | None = None, exported: Mapping[str, str] | None = None
) -> FabricPlan:
    """Decide for all nodes together. Pure: the same facts give the same plan everywhere.

    Args:
        nodes: what is known of each, by name.
        wish: what the configuration asks for.
        exported: what the user exported, alike on all nodes; a node's own `settings` come on top.

    Returns:
        The plan. What can't be decided is `None` there and a problem with the difference between the nodes; nothing is
        guessed.
    """
    wish = wish or FabricWish()
    rejected = {name: _rejected(node) for name, node in nodes.items()}
    candidates = {name: _candidates(node, rejected[name], wish) for name, node in nodes.items()}
    agreement = agree(candidates)
    devices = _devices(nodes)
    fabric, reason, problems = _fabric(devices, wish)
    choices: dict[str, NodeChoice] = {}
    for name, node in nodes.items():
        settings = {**(exported or {}), **node.settings}
        choice = _choice(name, node, agreement, rejected[name], devices[name])
        if choice.interface is None and candidates[name]:
            choice = replace(choice, reason=NOTHING_IN_COMMON, advice=None)
        made = translate(fabric, choice.interface, choice.rails, devices[name].words, node)
        kept = {each: settings[each] for each in settings if settings[each]}
        environment = {each: value for each, value in made.items() if each not in kept}
        choices[name] = replace(choice, environment=environment, kept=kept)
        problems += check_settings(settings, node, choice.interface)
        problems += _unknown_wish(node, wish)
    problems += _disagreement(nodes, candidates, agreement, choices)
    return FabricPlan(fabric, reason, choices, tuple(_unique(problems)))


def _devices(nodes: Mapping[str, NodeNetwork]) -> dict[str, DeviceChoice]:
    """The choice of each node, made once for all that hold the same tuple of adapters (`NodeNetwork.from_json`)."""
    made: dict[int, DeviceChoice] = {}
    for node in nodes.values():
        if id(node.devices) not in made:
            made[id(node.devices)] = choose_devices(node)
    return {name: made[id(node.devices)] for name, node in nodes.items()}


def _rejected(node: NodeNetwork) -> dict[str, str]:
    return {name: why for name, interface in node.interfaces.items() if (why := why_not(interface, node))}


def _candidates(node: NodeNetwork, rejected: Mapping[str, str], wish: FabricWish) -> list[Candidate]:
    defaults = [route.interface for route in node.routes if route.destination.prefixlen == 0]
    asked = [r.interface for r in node.routes if r.destination.prefixlen == r.destination.max_prefixlen]
    found = [
        Candidate(
            interface,
            interface.routable,
            class_of(interface, node),
            # A route that was asked for (`ip route get`) is the best evidence; the default route some.
            2 if interface.name in asked else 1 if interface.name in defaults else 0,
        )
        for name, interface in node.interfaces.items()
        if name not in rejected and wish.interface in (None, name)
    ]
    # Where no address is told at all, only one that is alone in its class is no guess.
    best = max((each.quality for each in found), default=0)
    if sum(each.quality == best for each in found) > 1 and all(is_untold(each.interface, node) for each in found):
        return []
    return found


def _choice(
    name: str, node: NodeNetwork, agreement: Agreement, rejected: Mapping[str, str], devices: DeviceChoice
) -> NodeChoice:
    taken = agreement.taken.get(name) or agreement.single.get(name)
    every = {**rejected, **devices.rejected}
    if taken is None:
        why, advice = _why_none(node)
        return NodeChoice(None, why, devices=tuple(devices.names()), rejected=every, advice=advice)
    interface = taken.interface.name
    rails = tuple(rail.interface.name for rail in agreement.rails.get(name, [taken]))
    passed_over = {each: "another serves better" for each in node.interfaces if each not in every}
    unused = {each: why for each, why in {**passed_over, **every}.items() if each not in (interface, *rails)}
    return NodeChoice(interface, agreement.reason, rails, _first(taken), tuple(devices.names()), unused)


def _first(taken: Candidate) -> str | None:
    return str(taken.addresses[0].ip) if taken.addresses else None


def _why_none(node: NodeNetwork) -> tuple[str, str | None]:
    """Why no interface of a node is taken, and what is likely all the same."""
    for master, ports in node.missing_masters().items():
        why = f"{', '.join(ports)} are ports of {master}, which is not in this text"
        return why, f"{master}, if `ip addr show {master}` shows an address and a carrier"
    if any(re.match(r"nmn\d", name) for name in node.interfaces):
        why = "it tells only of the management network (nmn) of an HPE Cray system"
        return why, "hsn0 (NCCL: the prefix hsn), as high-speed interfaces are called there, if `ip addr` shows it"
    if several := [name for name, each in node.interfaces.items() if is_untold(each, node) and not why_not(each, node)]:
        why = f"addresses are not told, and {', '.join(several)} may all have one"
        return why, f"the one of {', '.join(several)} for which `ip addr` shows an address that all nodes can reach"
    if not node.interfaces:
        return "no interfaces are listed", "what `ip -4 route get ADDRESS_OF_RANK_0` prints after `dev`"
    cut = "" if node.complete else " that is cut or partial"
    return f"no usable interface in a text{cut}" if not node.live else "no usable interface", None


def _fabric(devices: Mapping[str, DeviceChoice], wish: FabricWish) -> tuple[str, str, list[Problem]]:
    if wish.fabric == "tcp":
        return "tcp", "asked by comm.fabric=tcp", []
    fabric, problems = same_fabric(devices)
    if wish.fabric != "auto":
        lacking = {name: choice for name, choice in devices.items() if choice.fabric != wish.fabric}
        problems = [problem for problem in problems if problem.severity != "error"]
        for name, choice in list(lacking.items())[:8]:
            seen = "; ".join(f"{each}: {why}" for each, why in choice.rejected.items())
            there = f"it has {', '.join(choice.names())} ({choice.fabric})" if choice.devices else seen or "it has none"
            problems.append(
                Problem(
                    "error",
                    f"comm.fabric={wish.fabric}",
                    f"{name} has no usable {wish.fabric} device: {there}",
                    f"comm.fabric={choice.fabric}, or comm=auto",
                    name,
                    "comm.fabric",
                )
            )
        return wish.fabric, f"asked by comm.fabric={wish.fabric}", problems
    if fabric == "tcp":
        return "tcp", "no RDMA device that all nodes can use is known", problems
    names = sorted({name for choice in devices.values() for name in choice.names()})
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return fabric, f"all nodes have it: {shown}", problems


def _unknown_wish(node: NodeNetwork, wish: FabricWish) -> list[Problem]:
    name = wish.interface
    if name is None or not node.interfaces or (name in node.interfaces and not why_not(node.interfaces[name], node)):
        return []
    valid = [each for each, interface in node.interfaces.items() if not why_not(interface, node)]
    if name in node.interfaces:
        why, fix = f"it can't carry ranks: {why_not(node.interfaces[name], node)}", ", ".join(valid) or "comm=auto"
    else:
        why, fix = f"{node.name} has no such network interface with an address", nearest(name, valid)
    return [Problem("error", f"comm.interface={name}", why, fix, node.name, "comm.interface")]


def _disagreement(
    nodes: Mapping[str, NodeNetwork],
    candidates: Mapping[str, list[Candidate]],
    agreement: Agreement,
    choices: Mapping[str, NodeChoice],
) -> list[Problem]:
    problems = [
        Problem("error", f"{name}: no interface", choice.reason, choice.advice or "`ip addr` of the whole node", name)
        for name, choice in choices.items()
        if choice.interface is None and not candidates[name] and not _told_by_user(choice)
    ]
    if agreement.taken or agreement.single or len(nodes) < 2 or not all(candidates.values()):
        return problems
    shown = [f"{name}: {', '.join(map(str, each)) or 'none'}" for name, each in list(candidates.items())[:16]]
    more = f"; and {len(nodes) - 16} more" if len(nodes) > 16 else ""
    fix = "comm.interface=NAME if one name leads to all nodes, or leave out the node that differs"
    return [*problems, Problem("error", NOTHING_IN_COMMON, "; ".join(shown) + more, fix)]


def _told_by_user(choice: NodeChoice) -> bool:
    return any(name in choice.kept for name in (*ONE_NAME[:1], *PREFIXES[:1]))


def _unique(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
