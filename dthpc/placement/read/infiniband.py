"""RDMA adapters as `ibstat`, `ibstatus`, `ibv_devinfo` and `ibdev2netdev` show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dthpc.placement.read import pci
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import Nic, Port, Source, Topology, bus_id

KIND_IBSTAT = "ibstat"
KIND_IBSTATUS = "ibstatus"
KIND_DEVINFO = "ibv_devinfo"
KIND_NETDEV = "ibdev2netdev"

_FIELD = re.compile(r"^[ \t]*([A-Za-z][\w ]*?)\s*:[ \t]*(.*?)[ \t]*$", re.M)
_NETDEV = re.compile(
    r"^\W*(?:(?P<bus>[0-9a-fA-F:]+\.[0-7])\s+)?(?P<name>[a-z][a-zA-Z_.-]*\d[\w.-]*)\b(?P<middle>.*?)\bport\s+(?P<port>\d+)\s*"
    r"(?:\((?P<state>\w+)\s*\))?\s*==>\s*(?P<net>\S+)\s*\((?P<up>\w+)\s*\)",
    re.M,
)


def read_ibstat(text: str, where: str = "ibstat") -> Topology:
    """The adapters of `ibstat`.

    Raises:
        UserError: the text names no adapter.
    """
    blocks = _blocks(clean(text), r"^[ \t]*CA '([^']+)'", where, "ibstat")
    return _topology(KIND_IBSTAT, where, [_of_ibstat(name, body) for name, body in blocks])


def read_ibstatus(text: str, where: str = "ibstatus") -> Topology:
    """The adapters of `ibstatus`.

    Raises:
        UserError: the text names no adapter.
    """
    nics: dict[str, Nic] = {}
    for head, body in _blocks(clean(text), r"^Infiniband device '([^']+' port \d+) status", where, "ibstatus"):
        name, _, number = head.partition("' port ")
        known = _fields(body)
        state = re.sub(r"^\d+:\s*", "", known.get("state", "")).lower() or None
        physical = re.sub(r"^\d+:\s*", "", known.get("phys state", "")).lower() or None
        port = Port(int(number), state, physical, _rate(known.get("rate")), _layer(known.get("link_layer")))
        earlier = nics.get(name, Nic(name, rdma=True))
        nics[name] = replace(earlier, ports=(*(earlier.ports or ()), port))
    return _topology(KIND_IBSTATUS, where, [_kinded(nic, "") for nic in nics.values()])


def read_ibv_devinfo(text: str, where: str = "ibv_devinfo") -> Topology:
    """The adapters of `ibv_devinfo`, plain or verbose.

    Raises:
        UserError: the text names no adapter.
    """
    blocks = _blocks(clean(text), r"^[ \t]*hca_id:[ \t]*(\S+)", where, "ibv_devinfo")
    return _topology(KIND_DEVINFO, where, [_of_devinfo(name, body) for name, body in blocks])


def read_ibdev2netdev(text: str, where: str = "ibdev2netdev") -> Topology:
    """The adapters of `ibdev2netdev` (`-v` too).

    The word at the end of a line is the state of the network interface. For InfiniBand it says nothing of the RDMA
    port, which is often used without an address; so it becomes the port's state for Ethernet alone.

    Raises:
        UserError: the text names no adapter.
    """
    nics: dict[str, Nic] = {}
    text = clean(text)
    lines = list({match.group().strip(): match for match in _NETDEV.finditer(text)}.values())
    broken = [line for line in text.split("\n") if "==>" in line and not _NETDEV.search(line)]
    if broken:
        raise refuse(where, "a line does not begin with its adapter", broken[0], "save the output of `ibdev2netdev`")
    for match in lines:
        interface, up = match["net"], match["up"].lower() == "up"
        ethernet = not re.match(r"ib", interface)
        state = match["state"].lower() if match["state"] else ("up" if up else "down") if ethernet else None
        port = Port(int(match["port"]), state, link_layer="ethernet" if ethernet else "infiniband")
        earlier = nics.get(match["name"], Nic(match["name"], rdma=True, interfaces=(), interfaces_up=()))
        nics[match["name"]] = replace(
            earlier,
            bus_id=bus_id(match["bus"]) if match["bus"] else None,
            interfaces=(*(earlier.interfaces or ()), interface),
            interfaces_up=(*(earlier.interfaces_up or ()), *([interface] if up else [])),
            ports=(*(earlier.ports or ()), port),
            model=" ".join(match["middle"].split()) or None,
        )
    if not nics:
        raise refuse(
            where, "there is no line `mlx5_0 port 1 ==> ib0 (Up)`", text[:80], "save the output of `ibdev2netdev`"
        )
    return _topology(KIND_NETDEV, where, [_kinded(nic, "") for nic in nics.values()])


def _blocks(text: str, head: str, where: str, command: str) -> list[tuple[str, str]]:
    found = list(re.finditer(head, text, re.M))
    if not found:
        raise refuse(
            where, f"the text names no adapter as {command} does", text[:80], f"save the output of `{command}`"
        )
    ends = [*(match.start() for match in found[1:]), len(text)]
    return [(match[1], text[match.end() : end]) for match, end in zip(found, ends, strict=True)]


def _of_ibstat(name: str, body: str) -> Nic:
    parts = re.split(r"^[ \t]*Port (\d+):", body, flags=re.M)
    known = _fields(parts[0])
    ports = []
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        own = _fields(text)
        state, physical = own.get("State", "").lower() or None, own.get("Physical state", "").lower() or None
        ports.append(Port(int(number), state, physical, _rate(own.get("Rate")), _layer(own.get("Link layer"))))
    model = known.get("CA type") or None
    return _kinded(Nic(name, ports=tuple(ports) or None, rdma=True, model=model), "")


def _of_devinfo(name: str, body: str) -> Nic:
    parts = re.split(r"^[ \t]*port:[ \t]*(\d+)", body, flags=re.M)
    known = _fields(parts[0])
    ports = []
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        own = _fields(text)
        state = re.sub(r"^PORT_|\s*\(\d+\)$", "", own.get("state", "")).lower() or None
        physical = re.sub(r"\s*\(\d+\)$", "", own.get("phys_state", "")).lower().replace("_", "") or None
        speed = re.match(r"([\d.]+) Gbps", own.get("active_speed", ""))
        width = re.match(r"(\d+)X", own.get("active_width", ""))
        rate = float(speed[1]) * int(width[1]) if speed and width else None
        ports.append(Port(int(number), state, physical, rate, _layer(own.get("link_layer"))))
    nic = Nic(name, ports=tuple(ports) or None, rdma=True, model=known.get("vendor_part_id") or None)
    return _kinded(nic, known.get("transport", ""))


def _kinded(nic: Nic, transport: str) -> Nic:
    """The adapter with its kind, from its name, its transport, and the link layers of its ports."""
    layers = [port.link_layer for port in nic.ports or () if port.link_layer]
    kind = pci.named_kind([nic.name])
    if kind is None and transport.lower().startswith("iwarp"):
        kind = "iwarp"
    if kind is None and transport.lower().startswith("unspecified"):
        kind = "efa" if re.match(r"rdmap|efa", nic.name) else None
    if kind is None and layers:
        kind = pci.nic_kind("", "", "", [nic.name], [], layers)
    # Azure's accelerated networking gives its virtual functions such names.
    virtual = True if re.match(r"mlx\d+_an\d", nic.name) else nic.virtual
    return replace(nic, kind=kind, virtual=virtual)


def _topology(kind: str, where: str, nics: Sequence[Nic]) -> Topology:
    nics = _each_once(nics, where)
    bare = [nic.name for nic in nics if not nic.ports]
    cut = [nic.name for nic in nics if kind == KIND_IBSTAT for port in nic.ports or () if port.link_layer is None]
    notes = [f"the text is cut within {bare[-1]}, whose ports are not known"] if bare else []
    notes += [f"the text is cut within the port of {cut[-1]}"] if cut else []
    return Topology(nics=tuple(nics), complete=not notes, sources=(Source(kind, where, ("nics",)),), notes=tuple(notes))


def _each_once(nics: Sequence[Nic], where: str) -> list[Nic]:
    """The adapters without repetitions, as of a text that was pasted twice.

    Raises:
        UserError: one stands there twice and differs.
    """
    found: dict[str, Nic] = {}
    for nic in nics:
        earlier = found.setdefault(nic.name, nic)
        if earlier != nic:
            why = f"{nic.name} stands there twice and differs, as in outputs of two nodes or of two times"
            raise refuse(where, why, nic.name, "give one output")
    return list(found.values())


def _fields(text: str) -> dict[str, str]:
    return dict(_FIELD.findall(text))


def _rate(text: str | None) -> float | None:
    match = re.match(r"[\d.]+", text or "")
    return float(match.group()) if match and float(match.group()) > 0 else None


def _layer(text: str | None) -> str | None:
    word = (text or "").lower()
    return word if word in ("infiniband", "ethernet") else None
