"""RDMA devices as `ibstat`, `ibv_devinfo`, `ibdev2netdev`, `cxi_stat` and `fi_info` show them."""

from __future__ import annotations

import re
from dataclasses import replace

from dthpc.comm.fabric.classify import is_high_speed
from dthpc.comm.fabric.model import FabricDevice, Interface, NodeNetwork
from dthpc.placement.read import infiniband
from dthpc.placement.read.pci import named_kind
from dthpc.placement.read.recognise import kinds_of, read_text
from dthpc.placement.read.text import clean
from dthpc.placement.topology import Nic, Port, Topology

_VERBS = {infiniband.KIND_IBSTAT, infiniband.KIND_IBSTATUS, infiniband.KIND_DEVINFO, infiniband.KIND_NETDEV}
_CXI = re.compile(r"^[ \t]*Device:[ \t]*(cxi\d+)", re.M)
_RDMA_LINK = re.compile(
    r"^[ \t]*(?:\d+/\d+:[ \t]*|link[ \t]+)([A-Za-z][\w.-]*)/(\d+)[: \t][^\n]*?\bstate[ \t]+(\w+)"
    r"(?:[^\n]*?\bphysical_state[ \t]+(\w+))?(?:[^\n]*?\bnetdev[ \t]+(\S+))?",
    re.M,
)
_PROVIDER = re.compile(r"^[ \t]*provider:[ \t]*([\w;]+)", re.M)
_KIND_OF_PROVIDER = {"efa": "efa", "cxi": "slingshot", "opx": "omnipath", "psm2": "omnipath", "psm3": "roce"}


def looks_like_devices(text: str) -> bool:
    """Whether a text holds the output of one of these tools."""
    return bool(_VERBS & set(kinds_of(text)) or _CXI.search(text) or _PROVIDER.search(text) or _RDMA_LINK.search(text))


def read_devices(text: str, name: str) -> NodeNetwork:
    """The devices, and the interfaces that they are told to belong to.

    Raises:
        UserError: the text can't be read without guessing.
    """
    text = clean(text)
    if _VERBS & set(kinds_of(text)):
        return of_topology(read_text(text, name), name)
    nics = _cxi(text) if _CXI.search(text) else _rdma_links(text) if _RDMA_LINK.search(text) else _providers(text)
    return of_topology(Topology(nics=tuple(nics)), name)


def of_topology(topology: Topology, name: str) -> NodeNetwork:
    """The network side of a topology: its adapters, and their interfaces with the state that was told."""
    interfaces: dict[str, Interface] = {}
    for nic in topology.nics or ():
        for each in nic.interfaces or ():
            known = nic.interfaces_up is not None
            state = ("UP" if each in (nic.interfaces_up or ()) else "DOWN") if known else None
            interfaces[each] = Interface(each, state=state)
    devices = tuple(FabricDevice(nic) for nic in topology.nics or () if nic.kind != "ethernet" or nic.rdma)
    return NodeNetwork(
        topology.host or name, interfaces, devices=devices, complete=topology.complete, notes=topology.notes
    )


def _cxi(text: str) -> list[Nic]:
    parts = _CXI.split(text)
    nics = []
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        state = re.search(r"Link state:[ \t]*(\w+)", body)
        speed = re.search(r"Link speed:[ \t]*\w*?_?(\d+)G", body)
        network = re.search(r"Network device:[ \t]*(\w+)", body)
        port = Port(1, state[1].lower() if state else None, rate_gbps=float(speed[1]) if speed else None)
        names = (network[1],) if network else None
        up = None if names is None or port.up is None else names if port.up else ()
        nics.append(Nic(name, kind="slingshot", interfaces=names, interfaces_up=up, ports=(port,)))
    return nics


def _rdma_links(text: str) -> list[Nic]:
    """The lines of `rdma link`, whose kind shows in the device's name, or in that of its interface."""
    nics: dict[str, Nic] = {}
    for name, number, state, physical, netdev in _RDMA_LINK.findall(text):
        high = not netdev or is_high_speed(Interface(netdev))
        port = Port(int(number), state.lower(), physical.lower().replace("_", "") or None)
        software = "software" if re.match(r"(?:rxe|siw)_?\w*$", name) else None
        kind = software or named_kind([name]) or ("infiniband" if high else "roce")
        known = nics.get(name, Nic(name, kind=kind, rdma=True, ports=()))
        interfaces = (*(known.interfaces or ()), *([netdev] if netdev else []))
        up = (*(known.interfaces_up or ()), *([netdev] if netdev and port.up else []))
        ports = (*(known.ports or ()), port)
        nics[name] = replace(known, ports=ports, interfaces=interfaces or None, interfaces_up=up)
    return list(nics.values())


def _providers(text: str) -> list[Nic]:
    """The domains of `fi_info`; layered providers (`verbs;ofi_rxm`) are those of their lowest."""
    parts = _PROVIDER.split(text)
    nics: dict[str, Nic] = {}
    for provider, body in zip(parts[1::2], parts[2::2], strict=True):
        base, domain = provider.split(";")[0], re.search(r"domain:[ \t]*(\S+)", body)
        if domain is None or base in ("tcp", "sockets", "udp", "shm", "sm2", "net", "lnx", "usnic"):
            continue
        name = re.sub(r"-(?:rdm|dgrm|dgram|xrc)$", "", domain[1])
        kind = _KIND_OF_PROVIDER.get(base) or named_kind([name])
        nics[name] = Nic(name, kind=kind, rdma=base != "cxi", ports=(Port(1, "active"),))
    return list(nics.values())
