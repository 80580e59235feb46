"""Interfaces and routes as iproute2 shows them: `ip addr`, `ip link`, `ip route`; plain, `-d`, `-o`, `-br` and `-j`."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dthpc.comm.fabric.lines import NAME, address, is_gap, is_hidden, plain_lines
from dthpc.comm.fabric.model import IfAddress, Interface, IPAddress, IPNetwork, NodeNetwork, Route

_HEAD = re.compile(rf"^(?:\d+:[ \t]*)?({NAME})(?:@({NAME}))?:[ \t]+<([A-Z0-9_,-]*)>(.*)$")
_CUT_HEAD = re.compile(rf"^\d+:[ \t]*({NAME})(?:@[\w.-]*)?(?::[ \t]*(?:<[A-Z0-9_,-]*)?)?$")
_ONE_LINE = re.compile(rf"^\d+:[ \t]+({NAME})(?:@{NAME})?[ \t]+(inet6?[ \t].*)$")
_STATES = r"UP|DOWN|UNKNOWN|LOWERLAYERDOWN|DORMANT|NOTPRESENT|TESTING"
_BRIEF = re.compile(rf"^({NAME})(?:@({NAME}))?[ \t]+({_STATES})(?:[ \t]+(.*))?$")
_JOINED = re.compile(rf"[ \t]+(?=\d+:[ \t]+{NAME}(?:@{NAME})?:[ \t]+<[A-Z])")
_JOINED_BODY = re.compile(r"[ \t]+(?=link/[a-z]|inet6?[ \t]+[\w*]*[.:])")
"""Where lines begin that something between the terminal and the file has joined."""

_INET = re.compile(r"^inet6?[ \t]+(\S+)(.*)$")
_KIND = re.compile(
    r"^(vlan|bond|bridge|veth|vxlan|geneve|tun|macvlan|macvtap|ipvlan|dummy|ipoib|wireguard|gre|gretap|ipip|sit|vti|"
    r"ip6tnl|ip6gre|vrf|team|openvswitch|ifb)(?:[ \t]|$)"
)
_ROUTE = re.compile(
    rf"^(?:(?:unicast|local)[ \t]+)?(default|[0-9a-fA-F:.]+(?:/\d+)?)[ \t](?:.*[ \t])?dev[ \t]+({NAME})\b(.*)$"
)
_OLD_ROUTE = re.compile(
    rf"^([\d.]+|default)[ \t]+([\d.]+|\*)[ \t]+([\d.]+)[ \t]+[UGHRDMAC!]+[ \t]+(\d+)[ \t]+\d+[ \t]+\d+[ \t]+({NAME})$"
)


def looks_like_ip(text: str) -> bool:
    """Whether a text holds interfaces or routes in one of iproute2's forms (or `route -n`)."""
    patterns = (_HEAD, _ONE_LINE, _BRIEF, _ROUTE, _OLD_ROUTE)
    return any(pattern.match(line) for line in plain_lines(text) for pattern in patterns)


def read_ip(text: str, name: str) -> NodeNetwork:
    """The interfaces of `ip addr` or `ip link`, and the routes of `ip route`, in any of the text forms."""
    reader = _Reader()
    for line in plain_lines(_JOINED.sub("\n", text)):
        for part in _JOINED_BODY.split(line) if _HEAD.match(line) else [line]:
            reader.take(part)
    return NodeNetwork(
        name,
        reader.joined(),
        routes=tuple(reader.routes),
        complete=reader.complete,
        notes=tuple(reader.notes),
    )


class _Reader:
    """Takes one line after the other."""

    def __init__(self) -> None:
        self.interfaces: dict[str, Interface] = {}
        self.routes: list[Route] = []
        self.notes: list[str] = []
        self.complete = True
        self._current: str | None = None
        self._addresses: dict[str, dict[IPAddress, IfAddress]] = {}
        """Those of each interface, apart from it: a text may give it thousands."""

    def joined(self) -> dict[str, Interface]:
        """The interfaces with their addresses."""
        held = self._addresses
        return {n: replace(each, addresses=tuple(held.get(n, {}).values())) for n, each in self.interfaces.items()}

    def take(self, line: str) -> None:
        if is_gap(line):
            self.complete = False
            self.notes.append("the text leaves lines out")
        elif head := _HEAD.match(line):
            self._open(_of_head(head))
        elif one := _ONE_LINE.match(line):
            self.interfaces.setdefault(one[1], Interface(one[1]))
            self._current = one[1]
            self._inside(one[2])
        elif brief := _BRIEF.match(line):
            self._open(_of_brief(brief))
        elif cut := _CUT_HEAD.match(line):
            self.complete, self._current = False, None
            self.notes.append(f"the text is cut within {cut[1]}")
        elif not self._routes(line):
            self._inside(line)

    def _open(self, interface: Interface) -> None:
        self.interfaces[interface.name] = interface
        for found in interface.addresses:
            self._hold(interface.name, found)
        self._current = interface.name

    def _hold(self, name: str, found: IfAddress) -> None:
        self._addresses.setdefault(name, {}).setdefault(found.ip, found)

    def _inside(self, line: str) -> None:
        """A line below the head of an interface."""
        if self._current is None:
            return
        interface = self.interfaces[self._current]
        if inet := _INET.match(line):
            found = _of_inet(inet[1], inet[2], interface.name)
            if found is not None:
                self._hold(interface.name, found)
            elif is_hidden(inet[1]):
                interface = replace(interface, hidden=True)
        elif link := re.match(r"^link/(\S+)(?:[ \t]+([0-9a-f:.]+))?", line):
            interface = replace(interface, link=link[1], mac=link[2] or None)
        elif alternative := re.match(r"^altname[ \t]+(\S+)", line):
            interface = replace(interface, altnames=(*interface.altnames, alternative[1]))
        elif interface.kind is None and (kind := _KIND.match(line)):
            interface = replace(interface, kind=kind[1])
        self.interfaces[self._current] = interface

    def _routes(self, line: str) -> bool:
        found = _of_route(line)
        if found is None:
            return False
        route, own = found
        self.routes.append(route)
        self.interfaces.setdefault(route.interface, Interface(route.interface))
        if own is not None:
            self._hold(route.interface, own)
        self._current = None
        return True


def _of_head(head: re.Match[str]) -> Interface:
    words = head[4].split()
    told = dict(zip(words[::2], words[1::2], strict=False))
    return Interface(
        head[1],
        flags=tuple(flag for flag in head[3].split(",") if flag),
        state=told.get("state"),
        master=told.get("master"),
        parent=head[2],
        mtu=int(told["mtu"]) if told.get("mtu", "").isdigit() else None,
    )


def _of_brief(brief: re.Match[str]) -> Interface:
    words = (brief[4] or "").split()
    flags = next((word[1:-1].split(",") for word in words if re.fullmatch(r"<[A-Z0-9_,-]*>", word)), None)
    addresses = [found for word in words if (found := address(word)) is not None]
    mac = next((word for word in words if re.fullmatch(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5,}", word)), None)
    return Interface(
        brief[1],
        None if flags is None else tuple(flags),
        state=brief[3],
        parent=brief[2],
        addresses=tuple(found for found in addresses if str(found.ip) != mac),
        mac=mac,
        hidden=any(map(is_hidden, words)),
    )


def _of_inet(text: str, rest: str, interface: str) -> IfAddress | None:
    words = rest.split()
    # Of a point-to-point link: `inet LOCAL peer REMOTE/PREFIX`.
    prefix = words[1].partition("/")[2] if words[:1] == ["peer"] and "/" not in text else None
    label = next((word for word in words if word.startswith(f"{interface}:")), None)
    return address(text, prefix, label)


def _of_route(line: str) -> tuple[Route, IfAddress | None] | None:
    if match := _ROUTE.match(line):
        destination = _network(match[1], ":" in line.split(" dev ")[0])
        gateway = re.search(r"\bvia (?:inet6? )?(\S+)", line)
        own = re.search(r"\bsrc (\S+)", match[3])
        metric = re.search(r"\bmetric (\d+)", match[3])
        if destination is None:
            return None
        via = address(gateway[1]) if gateway else None
        source = address(own[1]) if own else None
        if source is not None and gateway is None and destination.prefixlen < destination.max_prefixlen:
            source = replace(source, prefix=destination.prefixlen)
        # Entries of the table tell who made them; the answer of `ip route get` does not.
        asked = destination.prefixlen == destination.max_prefixlen and not re.search(r"\b(?:proto|scope) ", match[3])
        place = Route(destination, match[2], via.ip if via else None, int(metric[1]) if metric else 0, asked)
        return place, source
    if match := _OLD_ROUTE.match(line):
        target = "0.0.0.0" if match[1] == "default" else match[1]
        destination = _network(f"{target}/{match[3]}", False)
        via = address(match[2])
        if destination is not None:
            return Route(destination, match[5], via.ip if via and int(via.ip) else None, int(match[4])), None
    return None


def _network(text: str, six: bool) -> IPNetwork | None:
    try:
        return ipaddress.ip_network(("::/0" if six else "0.0.0.0/0") if text == "default" else text, strict=False)
    except ValueError:
        return None


def read_ip_json(text: str, name: str) -> NodeNetwork:
    """What `ip -j addr`, `ip -j link` or `ip -j route` print."""
    return of_json_list(json.loads(text), name)


def of_json_list(entries: list[Any], name: str) -> NodeNetwork:
    """The list of objects that `ip -j` prints."""
    interfaces: dict[str, Interface] = {}
    routes: list[Route] = []
    for entry in entries:
        if isinstance(entry, Mapping) and "ifname" in entry:
            interfaces[entry["ifname"]] = _of_entry(entry)
        elif isinstance(entry, Mapping) and "dst" in entry and "dev" in entry:
            gateway = address(str(entry.get("gateway", "")))
            network = _network(str(entry["dst"]), gateway is not None and gateway.ip.version == 6)
            if network is not None:
                asked = network.prefixlen == network.max_prefixlen and not {"protocol", "scope"} & set(entry)
                metric = int(entry.get("metric", 0))
                routes.append(Route(network, entry["dev"], gateway.ip if gateway else None, metric, asked))
    return NodeNetwork(name, interfaces, routes=tuple(routes))


def _of_entry(entry: Mapping[str, Any]) -> Interface:
    name, parent = entry["ifname"], entry.get("link")
    if parent is None and "link_index" in entry:
        parent = f"if{entry['link_index']}" if entry["link_index"] else "NONE"
    found = [
        address(f"{told.get('local', '')}/{told.get('prefixlen', '')}", label=_alias(told.get("label"), name))
        for told in entry.get("addr_info", ())
    ]
    return Interface(
        name,
        flags=tuple(entry["flags"]) if "flags" in entry else None,
        link=entry.get("link_type"),
        state=entry.get("operstate"),
        master=entry.get("master"),
        parent=parent,
        kind=(entry.get("linkinfo") or {}).get("info_kind"),
        mtu=entry.get("mtu"),
        addresses=tuple(each for each in found if each is not None),
        mac=entry.get("address"),
        altnames=tuple(entry.get("altnames", ())),
    )


def _alias(label: str | None, name: str) -> str | None:
    return None if label == name else label
