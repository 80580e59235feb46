"""The one decision: which interface and devices each node's ranks use, alike on all nodes, and what says so."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dthpc.comm.fabric.agree import Agreement, agree
from dthpc.comm.fabric.classify import class_of, is_untold, why_not
from dthpc.comm.fabric.devices import DeviceChoice, choose_devices, same_fabric
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.offer import Card, Cards, Offer
from dthpc.comm.fabric.settings import ONE_NAME, PREFIXES, as_address, check_settings
from dthpc.comm.fabric.translate import translate
from dthpc.comm.fabric.wire import likeness, numbers_of
from dthpc.errors import nearest
from dthpc.placement.problem import Problem

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
    sorts = _sorts(nodes, wish, exported or {})
    offers = {name: sorts[name].offer(node) for name, node in nodes.items()}
    agreement = agree(offers)
    fabric, reason, problems = _fabric({name: sort.devices for name, sort in sorts.items()}, wish)
    choices: dict[str, NodeChoice] = {}
    for name, node in nodes.items():
        taken = agreement.taken.get(name) or agreement.single.get(name)
        if taken is None:
            choices[name] = sorts[name].none(fabric, apart=bool(offers[name].cards))
        else:
            choice = sorts[name].choice(fabric, tuple(agreement.rails[name]), agreement.reason)
            choices[name] = replace(choice, address=offers[name].first(taken))
        problems += sorts[name].problems(node, choices[name].interface)
    problems += _disagreement(nodes, offers, agreement, choices)
    return FabricPlan(fabric, reason, choices, tuple(_unique(problems)))


def _sorts(nodes: Mapping[str, NodeNetwork], wish: FabricWish, exported: Mapping[str, str]) -> dict[str, _Sort]:
    """The sort of each node; nodes that are alike but for their addresses have one."""
    made: dict[Hashable, _Sort] = {}
    found = {}
    for name, node in nodes.items():
        alike = likeness(node)
        if alike not in made:
            made[alike] = _Sort(node, wish, exported)
        found[name] = made[alike]
    return found


class _Sort:
    """Nodes that are alike but for their names and addresses, and what is found once for all of them."""

    def __init__(self, node: NodeNetwork, wish: FabricWish, exported: Mapping[str, str]) -> None:
        self._node = node = replace(node, interfaces=dict(node.interfaces))
        self._wish = wish
        self._settings = {**exported, **node.settings}
        self._rejected = {name: why for name, each in node.interfaces.items() if (why := why_not(each, node))}
        self._cards = Cards(_cards(node, self._rejected, wish), node.interfaces)
        self._kept = {each: value for each, value in self._settings.items() if value}
        self._choices: dict[tuple[Any, ...], NodeChoice] = {}
        self._problems: dict[str | None, list[Problem]] = {}
        self.devices = choose_devices(node)

    def offer(self, node: NodeNetwork) -> Offer:
        """What a node of this sort may use."""
        return Offer(self._cards, numbers_of(node))

    def choice(self, fabric: str, rails: tuple[Card, ...], reason: str) -> NodeChoice:
        """What nodes of this sort use, without the address.

        Args:
            fabric: what carries the ranks.
            rails: the interface that was agreed on, and the others of that network.
            reason: of the agreement.
        """
        if rails not in self._choices:
            names = tuple(rail.name for rail in rails)
            every = {**self._rejected, **self.devices.rejected}
            passed_over = {each: "another serves better" for each in self._node.interfaces if each not in every}
            unused = {each: why for each, why in {**passed_over, **every}.items() if each not in names}
            choice = NodeChoice(names[0], reason, names, devices=tuple(self.devices.names()), rejected=unused)
            self._choices[rails] = self._with_variables(choice, fabric)
        return self._choices[rails]

    def none(self, fabric: str, apart: bool) -> NodeChoice:
        """The same where no interface is taken.

        Args:
            fabric: what carries the ranks.
            apart: whether there are interfaces that might have served.
        """
        if () not in self._choices:
            why, advice = (NOTHING_IN_COMMON, None) if apart else _why_none(self._node)
            every = {**self._rejected, **self.devices.rejected}
            choice = NodeChoice(None, why, devices=tuple(self.devices.names()), rejected=every, advice=advice)
            self._choices[()] = self._with_variables(choice, fabric)
        return self._choices[()]

    def _with_variables(self, choice: NodeChoice, fabric: str) -> NodeChoice:
        made = translate(fabric, choice.interface, choice.rails, self.devices.words, self._node)
        environment = {each: value for each, value in made.items() if each not in self._kept}
        return replace(choice, environment=environment, kept=self._kept)

    def problems(self, node: NodeNetwork, chosen: str | None) -> list[Problem]:
        """What is wrong with settings and wishes on a node of this sort."""
        if chosen not in self._problems:
            self._problems[chosen] = self._found(self._node, chosen)
        found = self._problems[chosen]
        if not found or node.name == self._node.name:
            return found
        if self._wish.interface is not None or any(map(as_address, self._settings.values())):
            return self._found(node, chosen)  # what is said names the node, or who holds an address there
        return [replace(problem, node=problem.node and node.name) for problem in found]

    def _found(self, node: NodeNetwork, chosen: str | None) -> list[Problem]:
        return check_settings(self._settings, node, chosen) + _unknown_wish(node, self._wish)


def _cards(node: NodeNetwork, rejected: Mapping[str, str], wish: FabricWish) -> list[Card]:
    defaults = [route.interface for route in node.routes if route.destination.prefixlen == 0]
    asked = [route.interface for route in node.routes if route.asked]
    found = [
        Card(
            name,
            class_of(interface, node),
            # A route that was asked for (`ip route get`) is the best evidence; the default route some.
            2 if name in asked else 1 if name in defaults else 0,
            interface.speed_gbps or 0.0,
        )
        for name, interface in node.interfaces.items()
        if name not in rejected and wish.interface in (None, name)
    ]
    found.sort(key=lambda card: "." in card.name)  # of equals, what a VLAN or partition stands on
    # Where no address is told at all, only one that is alone in its class is no guess.
    best = max((card.quality for card in found), default=0)
    untold = all(is_untold(node.interfaces[card.name], node) for card in found)
    return [] if untold and sum(card.quality == best for card in found) > 1 else found


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
    distinct = {id(choice): choice for choice in devices.values()}
    names = sorted({name for choice in distinct.values() for name in choice.names()})
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
    offers: Mapping[str, Offer],
    agreement: Agreement,
    choices: Mapping[str, NodeChoice],
) -> list[Problem]:
    problems = [
        Problem("error", f"{name}: no interface", choice.reason, choice.advice or "`ip addr` of the whole node", name)
        for name, choice in choices.items()
        if choice.interface is None and not offers[name].cards and not _told_by_user(choice)
    ]
    if agreement.taken or agreement.single or len(nodes) < 2 or not all(offer.cards for offer in offers.values()):
        return problems
    shown = [f"{name}: {', '.join(offer.words())}" for name, offer in list(offers.items())[:16]]
    more = f"; and {len(nodes) - 16} more" if len(nodes) > 16 else ""
    fix = "comm.interface=NAME if one name leads to all nodes, or leave out the node that differs"
    return [*problems, Problem("error", NOTHING_IN_COMMON, "; ".join(shown) + more, fix)]


def _told_by_user(choice: NodeChoice) -> bool:
    return any(name in choice.kept for name in (*ONE_NAME[:1], *PREFIXES[:1]))


def _unique(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
