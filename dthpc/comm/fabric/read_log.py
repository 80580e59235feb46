"""Networks as NCCL's and Gloo's logs and errors tell them: what was chosen, and what went wrong with it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from dthpc.comm.fabric.lines import NAME, is_hidden, plain_lines, settings_in, settings_of
from dthpc.comm.fabric.model import FabricDevice, IfAddress, Interface, IPAddress, NodeNetwork
from dthpc.placement.read.pci import named_kind
from dthpc.placement.topology import Nic, Port

_IFACE = re.compile(
    rf"(?:\[\d+\])?(?<![\w.])({NAME}(?::\d+)?):(\d+\.\d+\.\d+\.\d+"
    r"|[0-9a-fA-F]{0,4}:[0-9a-fA-F:.]{0,45}(?:%[\w.-]{1,32})?|[\w*#?]{1,4}(?:\.[\w*#?]{1,4}){3})<\d+>"
)
_SHORTENED = re.compile(rf"(?:\[\d+\])?(?<![\w.])({NAME}):fe80::\.\.\.")
_HCA = re.compile(rf"\[\d+\](?:{{\d+}})?[ ]?({NAME}):(\d+)/(IB|RoCE)\b")
_HOST = re.compile(r"^(?:\[[^\]]*\][ \t]*)?([A-Za-z][\w.-]*?):(?:\d+:\d+|[ \t])")
_NCCL = re.compile(r"\bNCCL (?:INFO|WARN)\b|\bNET ?/ ?(?:IB|Socket|OFI)\b")
_GLOO = re.compile(r"\b[Gg]loo\b|GLOO_|gloo/transport")


@dataclass
class _Seen:
    """What the log told of one host."""

    interfaces: dict[str, dict[IPAddress, IfAddress]] = field(default_factory=dict)
    devices: dict[str, FabricDevice] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    """In their order, each once."""

    settings: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    """Interfaces whose address was blotted out."""


def looks_like_log(text: str) -> bool:
    """Whether a text holds lines of NCCL or Gloo, or names with addresses as NCCL writes them."""
    return bool(_IFACE.search(text) or _NCCL.search(text) or _GLOO.search(text))


def read_log(text: str, name: str) -> list[NodeNetwork]:
    """The nodes of a log, each with the interfaces and devices that the library named there.

    A log shows what was chosen, not what there is: none of the nodes is complete.
    """
    hosts: dict[str, _Seen] = {}
    for line in plain_lines(text):
        host = _HOST.match(line)
        known = host is not None and bool(_NCCL.search(line) or _IFACE.search(line[host.end(1) + 1 :]))
        seen = hosts.setdefault(host[1] if host and known else name, _Seen())
        _take(seen, line, host.end(1) + 1 if host and known else 0)
    if len(hosts) == 1:
        # In the lists of a pod's description, name and value stand on lines of their own.
        next(iter(hosts.values())).settings.update(settings_of(text))
    told = {host: seen for host, seen in hosts.items() if seen.interfaces or seen.devices or seen.notes}
    return [_node(host, seen) for host, seen in (told or hosts).items()]


def _take(seen: _Seen, line: str, start: int) -> None:
    for match in _IFACE.finditer(line, start):
        base, colon, _ = match[1].partition(":")
        known = seen.interfaces.setdefault(base, {})
        try:
            ip = ipaddress.ip_address(match[2].split("%")[0])
            known.setdefault(ip, IfAddress(ip, label=match[1] if colon else None))
        except ValueError:  # shortened, as `fe80::...`, or blotted out
            seen.hidden |= {base} if is_hidden(match[2]) else set()
    for match in _SHORTENED.finditer(line, start):
        seen.interfaces.setdefault(match[1], {})
    for match in _HCA.finditer(line, start):
        _device(seen, match[1], int(match[2]), match[3])
    seen.settings.update(settings_in(line))
    seen.notes.update(dict.fromkeys(_remarks(line)))


def _device(seen: _Seen, name: str, number: int, layer: str) -> None:
    port = Port(number, "active", link_layer="infiniband" if layer == "IB" else "ethernet")
    earlier = seen.devices.get(name)
    ports = (*(earlier.nic.ports or () if earlier else ()), port)
    kind = named_kind([name]) or ("infiniband" if layer == "IB" else "roce")
    unique = {each.number: each for each in ports}
    seen.devices[name] = FabricDevice(Nic(name, kind=kind, rdma=True, ports=tuple(unique.values())))


_REMARKS = [
    (r"NET/IB ?: ?No device found", "NCCL found no InfiniBand or RoCE device"),
    (r"Using network Socket", "NCCL sends over TCP sockets"),
    (r"NET/Plugin.*(?:No plugin found|Could not find)|Failed to open libnccl-net", "NCCL found no network plugin"),
    (
        r"Unable to resolve hostname to a \(local\) address|using the loopback address as fallback",
        "Gloo could not resolve the host's own name and fell back to loopback, where no other node can reach it: "
        "it needs GLOO_SOCKET_IFNAME",
    ),
    (
        r"remote=\[?(?:127\.\d+\.\d+\.\d+|::1)\]?",
        "ranks dialled loopback to reach each other: the host's name resolves to it (see /etc/hosts)",
    ),
    (
        r"connect\w*[^\n]*\b172\.17\.0\.1\b[^\n]*(?:refused|timed out)",
        "ranks dialled 172.17.0.1, the address that every container engine's bridge has",
    ),
    (r"\b169\.254\.\d+\.\d+\b", "a link-local address (169.254.0.0/16) was taken, which leads to no other node"),
]


_HINT = re.compile(r"NET/|network Socket|libnccl-net|resolve|loopback|remote=|connect|169\.254\.|Unable to find", re.I)
"""What a line has that any of these says something of: few lines of a log do."""


def _remarks(line: str) -> list[str]:
    if not _HINT.search(line):
        return []
    found = [note for pattern, note in _REMARKS if re.search(pattern, line, re.I)]
    if lost := re.search(r"Unable to find (?:interface|address) for:? ([^\s,]+)", line):
        found.append(f"Gloo looked for an interface that is called {lost[1]!r}")
    return found


def _node(host: str, seen: _Seen) -> NodeNetwork:
    interfaces = {
        each: Interface(each, addresses=tuple(addresses.values()), hidden=each in seen.hidden)
        for each, addresses in seen.interfaces.items()
    }
    note = "a log shows what a library chose, not all that there is"
    return NodeNetwork(
        host,
        interfaces,
        devices=tuple(seen.devices.values()),
        settings=seen.settings,
        complete=False,
        notes=(*seen.notes, note),
    )
