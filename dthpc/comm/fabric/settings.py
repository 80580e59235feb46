"""What the variables that name interfaces and devices mean to the library that reads them, and whether they can work.

NCCL takes a list of prefixes, `=` for whole names and `^` for what is left out (NCCL user guide, "NCCL_SOCKET_IFNAME",
"NCCL_IB_HCA"); Gloo takes one whole name; UCX devices with their ports (`ucx_info -c`, UCX_NET_DEVICES).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dthpc.comm.fabric.classify import why_not
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.errors import nearest
from dthpc.placement.problem import Problem

ONE_NAME = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")
PREFIXES = ("NCCL_SOCKET_IFNAME", "RCCL_SOCKET_IFNAME")
LISTS = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
SOCKETS = (*ONE_NAME, *PREFIXES, *LISTS)
DEVICES = ("NCCL_IB_HCA", "UCX_NET_DEVICES")


def matches(value: str, names: Iterable[str]) -> list[str]:
    """The names that NCCL takes for a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA (ports apart)."""
    without = value.startswith("^")
    exact = value[without:].startswith("=")
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]

    def meant(name: str) -> bool:
        return name in words if exact else any(name.startswith(word) for word in words)

    return [name for name in names if meant(name) != without]


def check_settings(settings: Mapping[str, str], node: NodeNetwork, chosen: str | None = None) -> list[Problem]:
    """What is wrong with settings on a node; as far as its interfaces are known.

    Args:
        settings: environment variables.
        node: where they would be used.
        chosen: the interface that was decided for it, to be named in the fix.
    """
    found: list[Problem] = []
    for name, value in settings.items():
        if not value:
            continue
        if name in SOCKETS:
            found += _sockets(name, value, node, chosen)
        elif name in DEVICES:
            found += _devices(name, value, node, chosen)
        elif name in ("MASTER_ADDR",):
            found += _master(name, value)
        else:
            found += _slow(name, value, node)
    return found


def as_address(text: str) -> str | None:
    """The address that a value is, perhaps with a prefix or a port; `None` where it is none."""
    word = text.strip().lstrip("=^").split(",")[0].split("/")[0].strip("[]")
    for candidate in (word, re.sub(r":\d+$", "", word)):
        try:
            return str(ipaddress.ip_address(candidate))
        except ValueError:
            continue
    return None


def _sockets(name: str, value: str, node: NodeNetwork, chosen: str | None) -> Iterator[Problem]:
    def refuse(why: str, fix: str, severity: str = "error") -> Problem:
        return Problem(severity, f"{name}={value}", why, fix, node.name, name)

    instead = chosen or "the name of one interface, as `ip -br addr` shows it"
    if (ip := as_address(value)) and not (name in LISTS and "/" in value):
        holder = node.holder(ip)
        yield refuse("it takes names of interfaces, and this is an address", f"{name}={holder or instead}")
    elif re.search(r"[A-Za-z]\w*:\w+", value):
        base = value.lstrip("=^").partition(":")[0]
        yield refuse("the label of an alias is the name of no interface", f"{name}={base}")
    elif name in ONE_NAME:
        yield from _one_name(name, value, node, chosen, refuse)
    elif node.interfaces and name in PREFIXES:
        yield from _prefixes(name, value, node, chosen, refuse)


def _one_name(name: str, value: str, node: NodeNetwork, chosen: str | None, refuse: Any) -> Iterator[Problem]:
    library = {"GLOO": "Gloo", "TP": "TensorPipe"}.get(name.split("_")[0], "libfabric")
    instead = f"{name}={chosen or 'one name'}"
    if re.search(r"[\^=,*\s]", value):
        yield refuse(f"{library} takes one whole name: no list, no ^, no = and no prefix", instead)
    elif node.interfaces and value not in node.interfaces and node.complete:
        longer = [each for each in node.interfaces if each.startswith(value)]
        why = f"{library} takes no prefix" if longer else "there is no such interface"
        yield refuse(why, f"{name}={longer[0]}" if longer else nearest(value, _usable(node) or node.interfaces))
    elif value in node.interfaces and (reason := why_not(node.interfaces[value], node)):
        yield refuse(f"{value} can't carry ranks: {reason}", instead, "warning" if reason == "loopback" else "error")


def _prefixes(name: str, value: str, node: NodeNetwork, chosen: str | None, refuse: Any) -> Iterator[Problem]:
    named = [each.name for each in node.interfaces.values() if each.addresses or node.live is False]
    taken = matches(value, named)
    usable = _usable(node)
    exact = f"{name}={f'={chosen}' if chosen else '=' + ','.join(usable or ['NAME'])}"
    wrong = [each for each in taken if each not in usable and node.interfaces[each].addresses]
    words = [word for word in value.lstrip("^=").split(",") if word]
    if not taken and node.complete:
        yield refuse("no interface matches", exact if usable else nearest(words[0] if words else "", node.interfaces))
    elif value.startswith("^") and "lo" in taken:
        yield refuse("leaving interfaces out lets lo back in", f"{name}=^lo,{value.lstrip('^')}, or {exact}", "warning")
    elif wrong and not set(taken) & set(usable):
        reasons = "; ".join(f"{each}: {why_not(node.interfaces[each], node)}" for each in wrong)
        yield refuse(f"it takes only what can't carry ranks ({reasons})", exact)
    elif not value.startswith(("^", "=")) and (more := _beyond(words, taken)):
        yield refuse(f"a bare name is a prefix, which takes {', '.join(more)} too", exact, "warning")
    elif wrong:
        yield refuse(f"it also takes {', '.join(wrong)}, which can't carry ranks", exact, "warning")


def _beyond(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """What a prefix takes besides the interface that it names wholly."""
    whole = [word for word in words if word in taken]
    return [each for each in taken if each not in whole and any(each.startswith(word) for word in whole)]


def _usable(node: NodeNetwork) -> list[str]:
    return [each.name for each in node.interfaces.values() if why_not(each, node) is None]


def _devices(name: str, value: str, node: NodeNetwork, chosen: str | None) -> Iterator[Problem]:
    def refuse(why: str, fix: str, severity: str = "error") -> Problem:
        return Problem(severity, f"{name}={value}", why, fix, node.name, name)

    names = [device.name for device in node.devices]
    good = [device.name for device in node.devices if device.why_not() is None]
    if as_address(value):
        yield refuse("it takes names of devices, and this is an address", f"{name}={','.join(good) or 'mlx5_0'}")
        return
    if name == "UCX_NET_DEVICES" and (bare := [each for each in value.split(",") if each in names]):
        yield refuse("UCX names RDMA devices with their port", f"{name}={','.join(f'{each}:1' for each in bare)}")
        return
    if not names or (name == "UCX_NET_DEVICES" and (value == "all" or value in node.interfaces)):
        return
    taken = matches(value, names) if name == "NCCL_IB_HCA" else [n for n in names if n in re.split(r"[:,]", value)]
    if not taken:
        yield refuse("there is no such device", nearest(value.lstrip("=^").split(",")[0].split(":")[0], good or names))
    elif not set(taken) & set(good):
        reasons = "; ".join(f"{d.name}: {d.why_not()}" for d in node.devices if d.name in taken)
        yield refuse(f"it takes only what can't carry ranks ({reasons})", f"{name}={','.join(good) or chosen or ''}")


def _master(name: str, value: str) -> Iterator[Problem]:
    try:
        ip = ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        return
    if ip.is_loopback or ip.is_link_local:
        kind = "loopback" if ip.is_loopback else "link-local"
        fix = "leave it unset: rank 0 publishes the addresses of its interfaces, and each rank takes one that answers"
        yield Problem("warning", f"{name}={value}", f"it is {kind}, which leads to no other node", fix, setting=name)


def _slow(name: str, value: str, node: NodeNetwork) -> Iterator[Problem]:
    good = [device for device in node.devices if device.why_not() is None and device.kind in ("infiniband", "roce")]
    if good and (name, value.lower()) in {("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket")}:
        why = f"NCCL leaves {', '.join(device.name for device in good)} aside and sends over TCP"
        yield Problem("warning", f"{name}={value}", why, f"unset {name}, or comm=tcp if it is meant", node.name, name)
