"""What nodes tell rank 0: as one text what most nodes of a cluster have alike, and as another each one's addresses.

So rank 0 reads the first once for all that tell the same, and finds once what follows from it (`likeness`).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dthpc.comm.fabric.model import IfAddress, Interface, NodeNetwork

_Told = tuple[int, type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address], int | None, str | None]
"""One address as the shared text tells of it: its place among the node's, its version, prefix and label."""


def pack(network: NodeNetwork) -> str:
    """A node's facts as the two texts, a line each."""
    form = network.to_json()
    own: list[str | int] = [form.pop("name")]
    for name, interface in network.interfaces.items():
        form["interfaces"][name]["addresses"] = [
            [each.ip.version, each.prefix, each.label, _reach(each)] for each in interface.addresses
        ]
        own += [int(each.ip) for each in interface.addresses]
    return f"{json.dumps(form)}\n{json.dumps(own)}"


def unpack(texts: Iterable[str]) -> list[NodeNetwork]:
    """The nodes that `pack` made texts of."""
    forms: dict[str, _Form] = {}
    found = []
    for text in texts:
        shared, _, own = text.partition("\n")
        form = forms.get(shared)
        if form is None:
            form = forms[shared] = _Form(json.loads(shared))
        name, *numbers = json.loads(own)
        found.append(form.node(name, numbers))
    return found


def likeness(node: NodeNetwork) -> Hashable:
    """Equal, as long as both live, for nodes that are known to be alike but for their names and addresses.

    Of the addresses all is alike but the number: which interface has how many, their prefixes, who can reach them.
    """
    interfaces = node.interfaces.form if isinstance(node.interfaces, Filled) else node.interfaces
    return (*map(id, (interfaces, node.devices, node.routes, node.settings)), node.complete, node.live)


def numbers_of(node: NodeNetwork) -> Sequence[int]:
    """All addresses of a node as numbers, in the order of its interfaces; the same places for alike nodes."""
    if isinstance(node.interfaces, Filled):
        return node.interfaces.numbers
    return [int(address.ip) for interface in node.interfaces.values() for address in interface.addresses]


class Filled(Mapping[str, Interface]):
    """Interfaces of a node; what alike nodes share is joined with its own addresses where an interface is asked for."""

    def __init__(self, form: _Form, numbers: Sequence[int]) -> None:
        self.form = form
        self.numbers = numbers

    def __getitem__(self, name: str) -> Interface:
        told = self.form.told[name]
        addresses = [IfAddress(version(self.numbers[place]), prefix, label) for place, version, prefix, label in told]
        return replace(self.form.interfaces[name], addresses=tuple(addresses))

    def __iter__(self) -> Iterator[str]:
        return iter(self.form.interfaces)

    def __len__(self) -> int:
        return len(self.form.interfaces)

    def __contains__(self, name: object) -> bool:
        return name in self.form.interfaces


class _Form:
    """What alike nodes share."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.told: dict[str, list[_Told]] = {}
        count = 0
        for name, interface in value["interfaces"].items():
            self.told[name] = [
                (place, ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address, prefix, label)
                for place, (version, prefix, label, _) in enumerate(interface["addresses"], count)
            ]
            count += len(self.told[name])
            interface["addresses"] = []
        self._network = NodeNetwork.from_json({"name": "", **value})
        self.interfaces = self._network.interfaces

    def node(self, name: str, numbers: Sequence[int]) -> NodeNetwork:
        """A node of this form."""
        shared = self._network
        return NodeNetwork(
            name,
            Filled(self, numbers),
            shared.devices,
            shared.routes,
            shared.settings,
            shared.complete,
            shared.notes,
            shared.live,
        )


def _reach(address: IfAddress) -> str:
    """What rules ask of an address but its number: whether others reach it, or those on its link alone."""
    return "far" if address.routable else "link" if address.ip.is_link_local else "own"
