"""Networks as JSON objects tell them: interfaces by name, nodes by name, or what somebody wrote down of a failure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dthpc.comm.fabric.lines import address, is_hidden, settings_of
from dthpc.comm.fabric.model import IfAddress, Interface, NodeNetwork
from dthpc.comm.fabric.read_ip import of_json_list

_SIGNS = {"flags", "inet", "inet6", "addr", "addr_info", "addresses", "ipv4", "ipv6", "operstate", "link_type"}
_ADDRESS_KEYS = (
    "inet",
    "inet6",
    "addr",
    "address",
    "addresses",
    "ipv4",
    "ipv6",
    "ips",
    "ip",
    "ipv6_link",
    "ipv6_global",
)
_KNOWN = re.compile(
    r"lo|(?:eth|en[opsxP]|em|p\d+p|ib|hsn|nmn|bond|team|docker|br|virbr|veth|wl|tun|wg|flannel|cali|cni|vlan)[\w.-]*\d[\w.-]*"
)
"""Names that are interfaces' where they stand alone in a list."""

_NAME_OF = ("name", "ifname", "interface", "device", "dev")


def read_facts(value: Any, name: str) -> list[NodeNetwork]:
    """The nodes that a parsed JSON value tells of.

    Args:
        value: `ip -j`'s list, an object of interfaces, an object of nodes of either, or an object of any facts.
        name: of the node where the value has none.
    """
    if isinstance(value, list):
        if any(isinstance(entry, Mapping) and ("ifname" in entry or "dst" in entry) for entry in value):
            return [of_json_list(value, name)]
        if value and all(isinstance(entry, str) and _KNOWN.fullmatch(entry) for entry in value):
            return [NodeNetwork(name, {entry: Interface(entry) for entry in value})]
        named = {_name_in(entry): entry for entry in value if isinstance(entry, Mapping) and _name_in(entry)}
        return read_facts(named, name) if named else [_situation(value, name)]
    if not isinstance(value, Mapping):
        return [_situation(value, name)]
    if "interfaces" in value and isinstance(value["interfaces"], (Mapping, list)):
        host = value.get("hostname") or value.get("host") or value.get("node") or name
        return read_facts(value["interfaces"], str(host))
    interfaces = {key: each for key, each in value.items() if _is_interface(str(key), each)}
    if interfaces:
        return [NodeNetwork(name, {str(key): _interface(str(key), each) for key, each in interfaces.items()})]
    if "nodes" in value and isinstance(value["nodes"], Mapping):
        return read_facts(value["nodes"], name)
    nodes = [node for key, each in value.items() for node in _of_node(str(key), each)]
    return nodes or [_situation(value, name)]


def _of_node(key: str, value: Any) -> list[NodeNetwork]:
    if not isinstance(value, (Mapping, list)) or (isinstance(value, Mapping) and not value):
        return []
    found = read_facts(value, key)
    return found if any(node.interfaces for node in found) else []


def _is_interface(key: str, value: Any) -> bool:
    if isinstance(value, Mapping) and bool(_SIGNS & set(value)):
        return True
    words = value if isinstance(value, list) else [value]
    plain = isinstance(value, Mapping) or all(isinstance(word, str) for word in words)
    return plain and bool(_KNOWN.fullmatch(key))


def _name_in(entry: Mapping[str, Any]) -> str | None:
    return next((str(entry[key]) for key in _NAME_OF if isinstance(entry.get(key), str)), None)


def _interface(name: str, value: Any) -> Interface:
    if not isinstance(value, Mapping):
        words = " ".join(value if isinstance(value, list) else [value])
        state = re.search(r"\b(down|up|no[- ]carrier)\b", words, re.I)
        value = {"addresses": words.split(), "state": state and ("UP" if state[1].lower() == "up" else "DOWN")}
    flags = value.get("flags")
    if isinstance(flags, str):
        flags = re.findall(r"[A-Z][A-Z_-]+", flags)
    return Interface(
        name,
        flags=None if flags is None else tuple(map(str, flags)),
        link=value.get("link_type") or value.get("link"),
        state=str(value.get("state") or value.get("operstate") or "").upper() or None,
        master=value.get("master"),
        parent=value.get("parent"),
        kind=value.get("kind"),
        mtu=value.get("mtu"),
        speed_gbps=value.get("speed_gbps"),
        addresses=tuple(found for key in _ADDRESS_KEYS for found in _addresses(value.get(key), name)),
        hidden=any(is_hidden(word) for key in _ADDRESS_KEYS for word in str(value.get(key, "")).split()),
    )


def _addresses(value: Any, interface: str) -> Iterator[IfAddress]:
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        label = re.search(rf"\b{re.escape(interface)}:\w+", text)
        found = address(text.split()[0].strip(",;()"), label=label.group() if label else None) if text.split() else None
        if found is not None:
            yield found


def _situation(value: Any, name: str) -> NodeNetwork:
    """What is wrong in facts that list no interfaces: addresses that can't work between nodes, settings."""
    notes: list[str] = []
    settings: dict[str, str] = {}
    for key, text in _texts(value, ""):
        notes += [note for note in _wrong_addresses(key, text) if note not in notes]
        settings.update(settings_of(f"{key}={text}") if re.fullmatch(r"[A-Z][A-Z0-9_]+", key) else settings_of(text))
    return NodeNetwork(name, settings=settings, complete=False, notes=(*notes, "no interfaces are listed"))


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, key)
    elif isinstance(value, str):
        yield key, value


def _wrong_addresses(key: str, text: str) -> Iterator[str]:
    if key.endswith("hosts"):
        yield from hosts_notes(text)
        return
    for word in re.findall(r"(?<![\w.])\d+\.\d+\.\d+\.\d+(?![\w.])", text):
        try:
            ip = ipaddress.ip_address(word)
        except ValueError:
            continue
        if ip.is_loopback:
            yield f"{key}: {ip} is loopback, where every node reaches only itself"
        elif ip.is_link_local:
            yield f"{key}: {ip} is link-local (169.254.0.0/16: a management controller or an internal USB card)"


def hosts_notes(text: str) -> Iterator[str]:
    """Names other than localhost that lines of /etc/hosts give to loopback."""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        try:
            loopback = bool(words) and ipaddress.ip_address(words[0]).is_loopback
        except ValueError:
            continue
        own = [word for word in words[1:] if not re.match(r"(?:ip6-)?(?:localhost|loopback)", word)]
        if loopback and own:
            yield (
                f"/etc/hosts gives {', '.join(own)} the address {words[0]}: others would dial their own loopback, "
                "so that an address must be taken from an interface, not from the name"
            )
