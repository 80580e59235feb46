"""Interfaces as `ifconfig` shows them: net-tools before 1.60 and after, and BSD's."""

from __future__ import annotations

import re
from dataclasses import replace

from dthpc.comm.fabric.lines import NAME, address, is_gap, is_hidden, plain_lines
from dthpc.comm.fabric.model import IfAddress, Interface, NodeNetwork

_NEW = re.compile(rf"^({NAME}(?::\w+)?):[ \t]+flags=\d+<([A-Z0-9_,]*)>(?:.*\bmtu[ \t]+(\d+))?")
_OLD = re.compile(rf"^({NAME}(?::\w+)?)[ \t]+Link encap:(.*)$")
_CUT = re.compile(rf"^({NAME}):[ \t]+flags=\d*(?:<[A-Z,]*)?$")
_WORD = r"(?:addr|adr|adresse|adres|dirección|direccion|indirizzo|endereço|end\.|адрес|地址)(?=[ \t:])"
"""What "address" is called where ifconfig spoke the user's language."""

_INET = re.compile(
    rf"^(?:{_WORD}[ \t]+)?inet6?(?:[ \t-]+{_WORD})?(?:[ \t]*:)?[ \t]*(\S+)"
    r"(?:.*?(?:netmask[ \t]+|M[^\W\d]+:|掩码:|prefixlen[ \t]+)(0x[0-9a-f]+|[\d.]+))?",
    re.I,
)
_OLD_FLAGS = re.compile(r"^((?:[A-Z]+[ \t]+)+)MTU:(\d+)")
_LINKS = {"Ethernet": "ether", "Local Loopback": "loopback", "InfiniBand": "infiniband", "UNSPEC": "unspec"}
_ENDS = re.compile(r"\bcollisions|\btxqueuelen:|\bTX bytes:")


def looks_like_ifconfig(text: str) -> bool:
    """Whether a text holds interfaces in one of ifconfig's layouts."""
    return any(_NEW.match(line) or _OLD.match(line) for line in plain_lines(text))


def read_ifconfig(text: str, name: str) -> NodeNetwork:
    """The interfaces of `ifconfig`; aliases (`eth0:1`) become addresses of the interface that they belong to."""
    found: list[Interface] = []
    notes: list[str] = []
    bodies: list[list[str]] = []
    held: list[list[IfAddress]] = []
    for line in plain_lines(text):
        if is_gap(line):
            notes.append("the text leaves lines out")
        elif head := _NEW.match(line):
            flags = tuple(flag for flag in head[2].split(",") if flag)
            found.append(Interface(head[1], flags=flags, mtu=int(head[3]) if head[3] else None))
            bodies.append([])
            held.append([])
        elif head := _OLD.match(line):
            found.append(_of_old(head))
            bodies.append([])
            held.append([])
        elif cut := _CUT.match(line):
            notes.append(f"the text is cut within {cut[1]}")
        elif found:
            found[-1] = _inside(found[-1], line, held[-1])
            bodies[-1].append(line)
    if bodies and _is_cut(bodies):
        notes.append(f"the text is cut within {found[-1].name}")
    found = [replace(each, addresses=tuple(own)) for each, own in zip(found, held, strict=True)]
    return NodeNetwork(name, _without_aliases(found), complete=not notes, notes=tuple(dict.fromkeys(notes)))


def _is_cut(bodies: list[list[str]]) -> bool:
    """Whether the last block lacks what ends every block that counts packets, or what ends the first."""
    first, last = ("\n".join(body) for body in (bodies[0], bodies[-1]))
    if any(end in first and end not in last for end in ("TX errors", "collisions", "RX bytes:")):
        return "RX packets" in last
    return "RX packets" in last and not _ENDS.search(last)


def _of_old(head: re.Match[str]) -> Interface:
    encapsulation, _, rest = head[2].partition("  ")
    mac = re.search(r"HWaddr[ \t]+([0-9A-Fa-f:-]+)", rest)
    link = _LINKS.get(encapsulation.strip(), encapsulation.strip().lower())
    return Interface(head[1], link=link, mac=mac[1].lower() if mac else None)


def _inside(interface: Interface, line: str, held: list[IfAddress]) -> Interface:
    """The interface with what a line of it tells; an address goes to the others, of which a text may have thousands."""
    if inet := _INET.match(line):
        found = address(inet[1], inet[2])
        if found is None:
            return replace(interface, hidden=interface.hidden or is_hidden(inet[1]))
        held.append(found)
        return interface
    if flags := _OLD_FLAGS.match(line):
        return replace(interface, flags=tuple(flags[1].split()), mtu=int(flags[2]))
    if link := re.match(r"^(ether|infiniband|loop|tunnel|unspec|ppp|sit)\b(?:[ \t]+([0-9A-Fa-f:-]+))?", line):
        return replace(interface, link={"loop": "loopback"}.get(link[1], link[1]), mac=link[2])
    if status := re.match(r"^status:[ \t]+(\w+)", line):  # BSD's word for the carrier
        return replace(interface, state="UP" if status[1] == "active" else "DOWN")
    return interface


def _without_aliases(found: list[Interface]) -> dict[str, Interface]:
    interfaces = {each.name: each for each in found if ":" not in each.name}
    for alias in found:
        base, colon, _ = alias.name.partition(":")
        if not colon:
            continue
        labelled = tuple(replace(each, label=alias.name) for each in alias.addresses)
        owner = interfaces.get(base, replace(alias, name=base, addresses=()))
        interfaces[base] = replace(owner, addresses=(*owner.addresses, *labelled))
    return interfaces
