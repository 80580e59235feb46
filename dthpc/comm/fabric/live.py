"""The network of this machine, asked of the kernel alone: no tool has to be installed."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Container, Mapping
from dataclasses import replace

from dthpc.comm.addresses import machine_addresses
from dthpc.comm.fabric.model import FabricDevice, IfAddress, Interface, NodeNetwork, Route
from dthpc.placement.read.pci import named_kind
from dthpc.placement.read.sysfs_devices import read_nics
from dthpc.placement.read.tree import DirectoryTree, Tree
from dthpc.placement.topology import Nic, Port

_NET = "sys/class/net"
_FLAGS = {
    0x1: "UP",
    0x2: "BROADCAST",
    0x8: "LOOPBACK",
    0x10: "POINTOPOINT",
    0x80: "NOARP",
    0x400: "MASTER",
    0x800: "SLAVE",
    0x1000: "MULTICAST",
}
"""Bits of `/sys/class/net/*/flags` (linux/if.h); the kernel hides RUNNING there, which `carrier` tells."""

_LINKS = {"1": "ether", "32": "infiniband", "772": "loopback", "768": "ipip", "776": "sit", "778": "gre", "280": "can"}
"""Numbers of `/sys/class/net/*/type` (linux/if_arp.h) in iproute2's words."""

_LIBRARIES = re.compile(r"(?:NCCL|GLOO|TP|UCX|FI|MPICH|MPIR_CVAR|OMPI_MCA|OFI_NCCL)_\w+$")
_RTF_UP = 0x1


def read_network(
    name: str | None = None, env: Mapping[str, str] = os.environ, placed: Container[str] = (), root: str = "/"
) -> NodeNetwork:
    """The interfaces with their addresses, the RDMA devices, the routes, and what the user exported.

    Args:
        name: of this node; the host's name if `None`.
        env: the environment.
        placed: variables in it that dthpc's placement has set, not the user.
        root: where `sys` and `proc` are mounted.
    """
    tree = DirectoryTree(root)
    interfaces = _interfaces(tree)
    addresses: dict[str, list[IfAddress]] = {}
    for found in machine_addresses():
        addresses.setdefault(found.interface, []).append(IfAddress(found.ip, found.prefix))
    for each, held in addresses.items():
        base = each.partition(":")[0]  # getifaddrs gives old aliases their label
        known = interfaces.get(base, Interface(base))
        labelled = tuple(replace(a, label=each) for a in held) if base != each else tuple(held)
        interfaces[base] = replace(known, addresses=(*known.addresses, *labelled))
    return NodeNetwork(
        name or socket.gethostname(),
        interfaces,
        devices=tuple(_devices(tree)),
        routes=tuple(_routes(tree)),
        settings={key: value for key, value in env.items() if _LIBRARIES.match(key) and key not in placed},
        live=True,
    )


def _interfaces(tree: Tree) -> dict[str, Interface]:
    names = [name for name in tree.names(_NET) if tree.names(f"{_NET}/{name}")]
    indices = {name: tree.read(f"{_NET}/{name}/ifindex") or "" for name in names}
    by_index = {index: name for name, index in indices.items()}
    order = sorted(names, key=lambda name: int(indices[name] or 0))
    return {name: _interface(tree, name, indices[name], by_index) for name in order}


def _interface(tree: Tree, name: str, index: str, by_index: Mapping[str, str]) -> Interface:
    base = f"{_NET}/{name}"
    below = tree.read(f"{base}/iflink") or index
    master = tree.target(f"{base}/master")
    driver = tree.target(f"{base}/device/driver")
    speed = tree.read(f"{base}/speed") or ""
    return Interface(
        name,
        flags=_flags(tree, base),
        link=_LINKS.get(tree.read(f"{base}/type") or ""),
        state=(tree.read(f"{base}/operstate") or "unknown").upper(),
        master=master.rpartition("/")[2] if master else None,
        parent=None if below == index else by_index.get(below, f"if{below}"),
        kind=_kind(tree, base),
        mtu=int(tree.read(f"{base}/mtu") or 0) or None,
        speed_gbps=int(speed) / 1000 if speed.isdigit() and int(speed) > 0 else None,
        driver=driver.rpartition("/")[2] if driver else None,
    )


def _flags(tree: Tree, base: str) -> tuple[str, ...]:
    bits = int(tree.read(f"{base}/flags") or "0", 16)
    flags = [word for bit, word in _FLAGS.items() if bits & bit]
    # `carrier` can't be read of an interface that is switched off.
    carrier = tree.read(f"{base}/carrier")
    return (*flags, *(["LOWER_UP"] if carrier == "1" else ["NO-CARRIER"] if bits & 1 else []))


def _kind(tree: Tree, base: str) -> str | None:
    told = re.search(r"^DEVTYPE=(\w+)", tree.read(f"{base}/uevent") or "", re.M)
    if told:
        return told[1]
    if tree.names(f"{base}/bridge"):
        return "bridge"
    if tree.names(f"{base}/bonding"):
        return "bond"
    return "tun" if tree.read(f"{base}/tun_flags") else None


def _devices(tree: Tree) -> list[FabricDevice]:
    nics = list(read_nics(tree))
    named = {nic.name for nic in nics}
    # What stands on no PCI bus: software devices, and those of some virtual machines.
    for name in sorted(set(tree.names("sys/class/infiniband")) - named):
        virtual = "/virtual/" in (tree.target(f"sys/class/infiniband/{name}") or "")
        base = f"sys/class/infiniband/{name}/ports"
        ports = tuple(_port(tree, f"{base}/{number}", number) for number in sorted(tree.names(base)))
        layers = {port.link_layer for port in ports}
        kind = named_kind([name]) or ("software" if virtual else "infiniband" if layers == {"infiniband"} else "roce")
        nics.append(Nic(name, kind=kind, rdma=True, ports=ports))
    return [FabricDevice(nic) for nic in nics if nic.rdma or nic.kind not in (None, "ethernet")]


def _port(tree: Tree, base: str, number: str) -> Port:
    state = re.match(r"\d+: (\w+)", tree.read(f"{base}/state") or "")
    rate = re.match(r"([\d.]+) Gb/sec", tree.read(f"{base}/rate") or "")
    layer = (tree.read(f"{base}/link_layer") or "").lower() or None
    return Port(
        int(number) if number.isdigit() else 1,
        state[1].lower() if state else None,
        rate_gbps=float(rate[1]) if rate else None,
        link_layer=layer,
    )


def _routes(tree: Tree) -> list[Route]:
    """The IPv4 routing table; the kernel writes addresses there as numbers in its own byte order."""
    found = []
    for line in (tree.read("proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or not int(words[3], 16) & _RTF_UP:
            continue
        target, gateway, mask = (ipaddress.IPv4Address(bytes.fromhex(words[place])[::-1]) for place in (1, 2, 7))
        network = ipaddress.ip_network(f"{target}/{mask}", strict=False)
        found.append(Route(network, words[0], gateway if int(gateway) else None, int(words[6])))
    return found
