"""The addresses of this machine, and which of them other machines are likely to reach."""

from __future__ import annotations

import ctypes
import ipaddress
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_IFF_UP = 0x1
_IFF_RUNNING = 0x40

_VIRTUAL = re.compile(
    r"^(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxd|vmnet|vboxnet|podman|tun|tap|dummy|kube|weave)"
)
"""Interfaces that container engines and hypervisors make; their addresses are often the same on every machine."""


@dataclass(frozen=True)
class Address:
    """One address of one interface."""

    interface: str
    """Name of the interface."""

    ip: IPAddress
    """The address, without scope."""

    running: bool
    """Whether the interface is up and has a carrier."""

    virtual: bool
    """Whether the interface is a bridge or another device that stands for no network card of a node."""

    prefix: int | None = None
    """Length of the network's part in bits."""


class _SockAddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
    ("broadcast", ctypes.c_void_p),
    ("private", ctypes.c_void_p),
]


def machine_addresses() -> list[Address]:
    """All IPv4 and IPv6 addresses of this network namespace, in the kernel's order, loopback included.

    Read by `getifaddrs`, which is also what Gloo asks: neither `ip` nor a readable name service is needed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        return list(_walk(head))
    finally:
        libc.freeifaddrs(head)


def _walk(entry: ctypes._Pointer[_IfAddrs]) -> Iterator[Address]:
    while entry:
        item = entry.contents
        ip = _ip_of(item.addr.contents) if item.addr else None
        if ip is not None:
            name = item.name.decode()
            running = bool(item.flags & _IFF_UP) and bool(item.flags & _IFF_RUNNING)
            mask = _ip_of(item.netmask.contents, ip.version) if item.netmask else None
            prefix = None if mask is None else int(mask).bit_count()
            yield Address(name, ip, running, _is_virtual(name), prefix)
        entry = item.next


def _ip_of(address: _SockAddr, version: int | None = None) -> IPAddress | None:
    """The address of a socket address; of a netmask, whose family some kernels leave out, by its address' version."""
    data = bytes(address.data)
    if address.family == socket.AF_INET or version == 4:
        return ipaddress.IPv4Address(data[2:6])
    if address.family == socket.AF_INET6 or version == 6:
        return ipaddress.IPv6Address(data[6:22])
    return None


def _is_virtual(name: str) -> bool:
    device = Path("/sys/class/net") / name
    return bool(_VIRTUAL.match(name)) or (device / "bridge").exists()


def candidates(addresses: Sequence[Address], names: Sequence[str] = (), interface: str | None = None) -> list[Address]:
    """Addresses at which another machine may reach this one, best first.

    Args:
        addresses: what `machine_addresses` found.
        names: names by which others know this machine (the scheduler's name first). Where one of them resolves to an
            address of this machine, that address comes first. They are asked only if there is a choice.
        interface: take the addresses of this interface only.
    """
    usable = [a for a in addresses if not a.ip.is_loopback and not a.ip.is_multicast and not a.ip.is_unspecified]
    if interface is not None:
        usable = [a for a in usable if a.interface == interface]
    routable = [a for a in usable if not a.ip.is_link_local]
    # Some sites run their fabric on 169.254/16; it is taken where there is nothing else. fe80::/10 needs a scope, which
    # has no meaning on another machine.
    usable = routable or [a for a in usable if a.ip.version == 4]
    named = resolve(names) if len(usable) > 1 else []

    def order(item: tuple[int, Address]) -> tuple[object, ...]:
        index, address = item
        known = named.index(address.ip) if address.ip in named else len(named)
        return not address.running, known, address.virtual, address.ip.version, index

    return [address for _, address in sorted(enumerate(usable), key=order)]


def resolve(names: Sequence[str]) -> list[IPAddress]:
    """Addresses that names resolve to, in order; names that do not resolve add nothing."""
    found: list[IPAddress] = []
    for name in names:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        for _, _, _, _, where in answers:
            ip = ipaddress.ip_address(str(where[0]).split("%")[0])
            if ip not in found:
                found.append(ip)
    return found


def interface_of(ip: str, addresses: Sequence[Address]) -> str | None:
    """Name of the interface that holds an address, or `None`."""
    wanted = ipaddress.ip_address(ip.split("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    return next((address.interface for address in addresses if address.ip == wanted), None)


def loopback_interface(addresses: Sequence[Address]) -> str:
    """Name of the loopback interface: `lo` on Linux."""
    return next((address.interface for address in addresses if address.ip.is_loopback), "lo")


def host_identity() -> str:
    """A text that two processes share exactly when they can reach each other by loopback.

    Host names do not tell: they may be equal on two machines, and differ in two containers of one.
    """
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
