"""Small texts of networks as tools print them, made for these tests."""

from __future__ import annotations

UP = "<BROADCAST,MULTICAST,UP,LOWER_UP>"


def link(number: int, name: str, *lines: str, flags: str = UP, state: str = "UP", more: str = "") -> str:
    """An interface as `ip addr` prints it."""
    head = f"{number}: {name}: {flags} mtu 1500 qdisc mq {more}state {state} group default qlen 1000"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


def inet(address: str, name: str, label: str = "") -> str:
    return f"inet {address} brd 10.255.255.255 scope global {label or name}"


ETHER = "link/ether 02:00:00:00:00:01 brd ff:ff:ff:ff:ff:ff"
LO = link(
    1,
    "lo",
    "link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00",
    "inet 127.0.0.1/8 scope host lo",
    "inet6 ::1/128 scope host",
    flags="<LOOPBACK,UP,LOWER_UP>",
    state="UNKNOWN",
)


def wired(number: int, name: str, address: str, **options: str) -> str:
    return link(number, name, ETHER, inet(address, name), **options)


def infiniband(number: int, name: str, address: str) -> str:
    mac = ":".join(["80"] + ["00"] * 19)
    return link(number, name, f"link/infiniband {mac} brd {mac}", inet(address, name))


def ifconfig(name: str, address: str | None, flags: str = "4163<UP,BROADCAST,RUNNING,MULTICAST>") -> str:
    """An interface as today's ifconfig prints it."""
    lines = [f"{name}: flags={flags}  mtu 1500"]
    if address:
        lines.append(f"        inet {address}  netmask 255.255.255.0  broadcast 10.255.255.255")
    lines += [
        "        ether 02:00:00:00:00:02  txqueuelen 1000  (Ethernet)",
        "        RX packets 10  bytes 100 (100.0 B)",
        "        TX packets 10  bytes 100 (100.0 B)",
        "        TX errors 0  dropped 0 overruns 0  carrier 0  collisions 0",
    ]
    return "\n".join(lines) + "\n\n"


def old_ifconfig(name: str, address: str, flags: str = "UP BROADCAST RUNNING MULTICAST") -> str:
    """An interface as ifconfig printed it before 2013."""
    return (
        f"{name:<9} Link encap:Ethernet  HWaddr 02:00:00:00:00:03\n"
        f"          inet addr:{address}  Bcast:10.255.255.255  Mask:255.255.0.0\n"
        f"          {flags}  MTU:1500  Metric:1\n"
        "          RX packets:1 errors:0 dropped:0 overruns:0 frame:0\n"
        "          TX packets:1 errors:0 dropped:0 overruns:0 carrier:0\n"
        "          collisions:0 txqueuelen:1000\n"
        "          RX bytes:1 (1.0 B)  TX bytes:1 (1.0 B)\n\n"
    )
