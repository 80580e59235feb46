"""What is known of a node's network: its interfaces with their addresses, its RDMA devices, its routes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dthpc.placement.topology import Nic, Port

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class IfAddress:
    """One address of an interface."""

    ip: IPAddress
    prefix: int | None = None
    """Length of the network's part in bits; `None`: the text did not tell."""

    label: str | None = None
    """Name of an alias (`ib0:2`) that the address was given under: no interface, and no library knows it."""

    @property
    def network(self) -> IPNetwork | None:
        """The subnet; none where the prefix is unknown or is that of a single host."""
        if self.prefix is None or self.prefix == self.ip.max_prefixlen:
            return None
        return ipaddress.ip_network((self.ip, self.prefix), strict=False)

    @property
    def routable(self) -> bool:
        """Whether another machine may reach it: neither loopback, link-local, multicast nor unspecified."""
        ip = self.ip
        if ip.version == 4:  # as numbers, because thousands of nodes ask for it
            value = int(ip)
            return value != 0 and value >> 24 not in (0, 127) and value >> 16 != 0xA9FE and value >> 28 != 0xE
        return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)

    def __str__(self) -> str:
        return str(self.ip) if self.prefix is None else f"{self.ip}/{self.prefix}"


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    flags: tuple[str, ...] | None = None
    """Flags in the order told (`UP`, `LOWER_UP`, `RUNNING`, `SLAVE`, …); `None`: not told."""

    link: str | None = None
    """Link type of iproute2: `ether`, `loopback`, `infiniband`, `ipip`, …"""

    state: str | None = None
    """Operational state, upper case: `UP`, `DOWN`, `UNKNOWN`, …"""

    master: str | None = None
    """The bond or bridge that this interface is a port of."""

    parent: str | None = None
    """What stands behind an `@` in `ip`: the interface below a VLAN; `if4` or `NONE` where it is elsewhere."""

    kind: str | None = None
    """Kind that the kernel tells (`bridge`, `bond`, `vlan`, `veth`, `tun`, …), where it was asked."""

    mtu: int | None = None
    speed_gbps: float | None = None
    addresses: tuple[IfAddress, ...] = ()
    mac: str | None = None
    altnames: tuple[str, ...] = ()
    driver: str | None = None
    """Kernel module of its device (`mlx5_core`, `cdc_ether`), where it was asked."""

    hidden: bool = False
    """Whether it has an address that the text's author blotted out (`10.x.x.12`)."""

    @property
    def up(self) -> bool | None:
        """Whether it is switched on and has a carrier; unknown where nothing of that is told."""
        if self.flags is not None:
            flags = set(self.flags)
            return "UP" in flags and "NO-CARRIER" not in flags and bool(flags & {"LOWER_UP", "RUNNING"})
        if self.state in ("UP", "DOWN", "LOWERLAYERDOWN", "DORMANT", "NOTPRESENT"):
            return self.state == "UP"
        # `ip -br` says UNKNOWN of devices that do not report a carrier (loopback, tunnels).
        return None

    @property
    def ipv4(self) -> tuple[IfAddress, ...]:
        return tuple(address for address in self.addresses if address.ip.version == 4)

    @cached_property
    def routable(self) -> tuple[IfAddress, ...]:
        """Addresses that others may reach: IPv4 first, those of an alias last."""
        found = [address for address in self.addresses if address.routable]
        return tuple(sorted(found, key=lambda address: (address.label is not None, address.ip.version)))


@dataclass(frozen=True)
class FabricDevice:
    """One adapter that RDMA libraries may use; a `Nic` of the placement, with what they ask of it."""

    nic: Nic

    @property
    def name(self) -> str:
        return self.nic.name

    @property
    def kind(self) -> str | None:
        return self.nic.kind

    @property
    def ports(self) -> tuple[Port, ...]:
        """Ports that are up, or of which nobody said that they are down."""
        return tuple(port for port in self.nic.ports or () if port.up is not False)

    def why_not(self) -> str | None:
        """Why ranks must not send over it, or `None`."""
        nic = self.nic
        if nic.kind in ("software", "iwarp", "usnic"):
            return {"software": "RDMA in software (Soft-RoCE or Soft-iWARP)"}.get(nic.kind, f"{nic.kind} is not served")
        if nic.rdma is False and nic.kind not in ("slingshot", "efa"):
            return "it has no RDMA device"
        if nic.virtual and nic.kind in ("ethernet", "roce", None):
            return "a virtual function of an Ethernet adapter"
        if nic.up is False:
            states = {port.physical or port.state for port in nic.ports or ()}
            return f"no port is active ({', '.join(sorted(filter(None, states)))})"
        return None


@dataclass(frozen=True)
class Route:
    """One entry of the routing table."""

    destination: IPNetwork
    interface: str
    gateway: IPAddress | None = None
    metric: int = 0
    asked: bool = False
    """Whether it is the kernel's answer for one address (`ip route get`), rather than an entry of the table."""


@dataclass(frozen=True)
class NodeNetwork:
    """The network of one node, as far as a text or the machine itself tells."""

    name: str
    interfaces: Mapping[str, Interface] = field(default_factory=dict)
    devices: tuple[FabricDevice, ...] = ()
    routes: tuple[Route, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of NCCL, Gloo, UCX, libfabric and MPI that were found with it."""

    complete: bool = True
    """False where the text does not list all interfaces: cut, or only what a library chose."""

    notes: tuple[str, ...] = ()
    """What was odd, one sentence each."""

    live: bool = False
    """Whether the machine itself was asked, so that a name which is not here does not exist."""

    def missing_masters(self) -> dict[str, list[str]]:
        """Masters that ports name and that are not in the text, with those ports."""
        absent: dict[str, list[str]] = {}
        for interface in self.interfaces.values():
            if interface.master and interface.master not in self.interfaces:
                absent.setdefault(interface.master, []).append(interface.name)
        return absent

    def holder(self, ip: str) -> str | None:
        """The interface that holds an address, or `None`."""
        try:
            wanted = ipaddress.ip_address(ip.split("%")[0])
        except ValueError:
            return None
        for interface in self.interfaces.values():
            if any(address.ip == wanted for address in interface.addresses):
                return interface.name
        return None

    def merged(self, other: NodeNetwork) -> NodeNetwork:
        """What two texts of one node tell together; where both tell of an interface, the one that tells more."""
        interfaces = dict(self.interfaces)
        for name, interface in other.interfaces.items():
            known = interfaces.get(name)
            interfaces[name] = interface if known is None else _joined(known, interface)
        devices = {device.name: device for device in (*self.devices, *other.devices)}
        return replace(
            self,
            interfaces=interfaces,
            devices=tuple(devices.values()),
            routes=(*self.routes, *other.routes),
            settings={**self.settings, **other.settings},
            complete=self.complete and other.complete,
            notes=(*self.notes, *other.notes),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is unknown is left out."""
        return {
            "name": self.name,
            "interfaces": {name: _interface_json(each) for name, each in self.interfaces.items()},
            "devices": [_device_json(device) for device in self.devices],
            "routes": [_route_json(route) for route in self.routes],
            "settings": dict(self.settings),
            "complete": self.complete,
            "notes": list(self.notes),
            "live": self.live,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeNetwork:
        """What `to_json` made."""
        return cls(
            name=value["name"],
            interfaces={name: _interface_of(name, each) for name, each in value["interfaces"].items()},
            devices=tuple(map(_device_of, value["devices"])),
            routes=tuple(
                Route(ipaddress.ip_network(d), i, None if g is None else ipaddress.ip_address(g), m, asked)
                for d, i, g, m, asked in value["routes"]
            ),
            settings=value["settings"],
            complete=value["complete"],
            notes=tuple(value["notes"]),
            live=value["live"],
        )


_TEXTS = ("link", "state", "master", "parent", "kind", "mtu", "speed_gbps", "mac", "driver")


def _joined(a: Interface, b: Interface) -> Interface:
    told = {name: getattr(b, name) for name in _TEXTS if getattr(a, name) is None}
    known = {address.ip for address in a.addresses}
    return replace(
        a,
        flags=a.flags if a.flags is not None else b.flags,
        hidden=a.hidden or b.hidden,
        addresses=(*a.addresses, *(address for address in b.addresses if address.ip not in known)),
        altnames=tuple(dict.fromkeys((*a.altnames, *b.altnames))),
        **told,
    )


def _route_json(route: Route) -> list[Any]:
    gateway = None if route.gateway is None else str(route.gateway)
    return [str(route.destination), route.interface, gateway, route.metric, route.asked]


def _interface_json(interface: Interface) -> dict[str, Any]:
    made: dict[str, Any] = {name: getattr(interface, name) for name in _TEXTS if getattr(interface, name) is not None}
    if interface.flags is not None:
        made["flags"] = list(interface.flags)
    if interface.hidden:
        made["hidden"] = True
    if interface.altnames:
        made["altnames"] = list(interface.altnames)
    made["addresses"] = [[str(a.ip), a.prefix, a.label] for a in interface.addresses]
    return made


def _interface_of(name: str, value: Mapping[str, Any]) -> Interface:
    flags = value.get("flags")
    return Interface(
        name,
        flags=None if flags is None else tuple(flags),
        addresses=tuple(IfAddress(ipaddress.ip_address(ip), prefix, label) for ip, prefix, label in value["addresses"]),
        altnames=tuple(value.get("altnames", ())),
        hidden=value.get("hidden", False),
        **{text: value.get(text) for text in _TEXTS},
    )


def _device_json(device: FabricDevice) -> dict[str, Any]:
    nic = device.nic
    made: dict[str, Any] = {"name": nic.name, "kind": nic.kind, "virtual": nic.virtual, "rdma": nic.rdma}
    for key in ("interfaces", "interfaces_up"):
        names = getattr(nic, key)
        made[key] = None if names is None else list(names)
    if nic.ports is not None:
        made["ports"] = [[p.number, p.state, p.physical, p.rate_gbps, p.link_layer] for p in nic.ports]
    return {key: item for key, item in made.items() if item is not None}


def _device_of(value: Mapping[str, Any]) -> FabricDevice:
    ports = value.get("ports")
    return FabricDevice(
        Nic(
            value["name"],
            kind=value.get("kind"),
            virtual=value.get("virtual"),
            rdma=value.get("rdma"),
            ports=None if ports is None else tuple(Port(*port) for port in ports),
            interfaces=_names(value.get("interfaces")),
            interfaces_up=_names(value.get("interfaces_up")),
        )
    )


def _names(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)
