"""Interfaces in the tables of `nmcli` (NetworkManager), `networkctl` (systemd), `ifconfig -s` and `netstat -i`."""

from __future__ import annotations

import re
from dataclasses import replace

from dthpc.comm.fabric.lines import NAME, address, is_gap, is_hidden, plain_lines
from dthpc.comm.fabric.model import Interface, NodeNetwork

_STATE = r"connected|connecting|disconnected|unavailable|unmanaged|deactivating"
_BLOCK = re.compile(rf"^({NAME}): ({_STATE})\b(?:.* to .*)?")
_ROW = re.compile(rf"^({NAME})[ \t]+([\w-]+)[ \t]+({_STATE})\b")
_FIELD = re.compile(r"^(GENERAL|IP4|IP6)\.(DEVICE|TYPE|STATE|ADDRESS)(?:\[\d+\])?:[ \t]+(.*)$")
_INET = re.compile(r"^inet[46][ \t]+(\S+)")
_TYPE = re.compile(r"^(ethernet|infiniband|bridge|bond|vlan|tun|wifi|loopback|team|veth|wireguard|dummy)\b")
_COUNTS = re.compile(rf"^({NAME})\*?[ \t]+(\d+)(?:[ \t]+\d+){{4,9}}[ \t]+([A-Zms]+)$")
_LINK = re.compile(
    rf"^\d+[ \t]+({NAME})[ \t]+([a-z]+)[ \t]+"
    r"(off|no-carrier|dormant|degraded-carrier|carrier|degraded|enslaved|routable)[ \t]+[a-z]+"
)
"""A row of `networkctl` (networkctl(1), "list")."""

_LETTERS = {"B": "BROADCAST", "L": "LOOPBACK", "M": "MULTICAST", "m": "MASTER", "s": "SLAVE", "R": "RUNNING", "U": "UP"}
"""Letters of the last column of `netstat -i` (netstat(8)); of these `R` is the carrier."""


def looks_like_table(text: str) -> bool:
    """Whether a text holds devices of `nmcli` or `networkctl`, or rows of `ifconfig -s` or `netstat -i`."""
    patterns = (_BLOCK, _ROW, _FIELD, _COUNTS, _LINK)
    return any(pattern.match(line) for line in plain_lines(text) for pattern in patterns)


def read_tables(text: str, name: str) -> NodeNetwork:
    """The interfaces of `nmcli`, `nmcli device`, `nmcli device show` or `networkctl`, or of a table of counters."""
    found: dict[str, Interface] = {}
    current: str | None = None
    notes: list[str] = []
    for line in plain_lines(text):
        if is_gap(line):
            notes.append("the text leaves lines out")
        elif counts := _COUNTS.match(line):
            flags = tuple(_LETTERS[letter] for letter in counts[3] if letter in _LETTERS)
            found[counts[1]] = Interface(counts[1], flags=flags, mtu=int(counts[2]))
        elif link := _LINK.match(line):
            state = "DOWN" if link[3] in ("off", "no-carrier", "dormant") else "UP"
            found[link[1]] = _typed(Interface(link[1], state=state), {"ether": "ethernet"}.get(link[2], link[2]))
        elif head := _BLOCK.match(line):
            current = head[1]
            found[current] = Interface(current, state=_state(head[2]))
        elif row := _ROW.match(line):
            found[row[1]] = _typed(Interface(row[1], state=_state(row[3])), row[2])
        elif field := _FIELD.match(line):
            current = field[3].strip() if field[2] == "DEVICE" else current
            if current is not None:
                found[current] = _told(found.get(current, Interface(current)), field[2], field[3].strip())
        elif current is not None and (inet := _INET.match(line)):
            found[current] = _told(found[current], "ADDRESS", inet[1])
        elif current is not None and (kind := _TYPE.match(line)):
            found[current] = _typed(found[current], kind[1])
    return NodeNetwork(name, found, complete=not notes, notes=tuple(dict.fromkeys(notes)))


def _state(word: str) -> str | None:
    """What NetworkManager's state tells of the carrier; of what it does not manage, nothing."""
    return {"connected": "UP", "disconnected": "DOWN", "unavailable": "DOWN"}.get(word)


def _told(interface: Interface, key: str, value: str) -> Interface:
    if key == "TYPE":
        return _typed(interface, value)
    if key == "STATE":
        word = re.search(rf"\(({_STATE})", value)
        return replace(interface, state=_state(word[1]) if word else None)
    if key == "ADDRESS":
        one = address(value)
        if one is not None:
            return replace(interface, addresses=(*interface.addresses, one))
        return replace(interface, hidden=interface.hidden or is_hidden(value))
    return interface


def _typed(interface: Interface, kind: str) -> Interface:
    if kind in ("ethernet", "wifi"):
        return replace(interface, link="ether")
    if kind in ("infiniband", "loopback"):
        return replace(interface, link=kind)
    return replace(interface, kind=kind)
