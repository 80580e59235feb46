"""The cluster's network: one namespace a host, wired by veth pairs to a bridge that has a namespace of its own.

Keeping the bridge out of the launch host's namespace keeps that host's firewall and bridge filters out of the cluster.
One more pair, `mc-NAME`, gives the launch host an address in the cluster, so that sbatch and squeue work there too.
"""

import os
import re
import zlib
from pathlib import Path

from .errors import MiniError
from .procs import attempt, checked, namespace_of
from .spec import LOGIN

RUN_NETNS = Path("/run/netns")
FABRIC = "fabric"
LOGIN_ADDRESS = 250
UPLINK_ADDRESS = 254


def netns(name, host):
    """The name of a host's network namespace."""
    return f"minicluster.{name}.{host}"


def existing(name):
    """The files under /run/netns that belong to the cluster, by host."""
    prefix = netns(name, "")
    return {path.name[len(prefix) :]: path for path in RUN_NETNS.glob(prefix + "*")}


def identities(name):
    """The kernel's identities of the cluster's namespaces; they stay valid while the files exist."""
    return {found for path in existing(name).values() if (found := namespace_of(path))}


def plan(spec):
    """Choose the cluster's /24 and give every host its address.

    198.18.0.0/15 is set aside for benchmarks of network devices (RFC 2544), so no site uses it for hosts.
    """
    taken = set(re.findall(r"\b198\.19\.(\d+)\.\d+", ip("-4", "-o", "addr", "show")))
    first = zlib.crc32(spec.name.encode())
    for i in range(256):
        third = str((first + i) % 256)
        if third not in taken:
            break
    else:
        raise MiniError("network: all of 198.19.0.0/16 is in use on this machine; take another cluster down first")
    base = f"198.19.{third}"
    return {LOGIN: f"{base}.{LOGIN_ADDRESS}", **{name: f"{base}.{i}" for i, name in enumerate(spec.node_names, 1)}}


def build(name, addresses, keep_fds=()):
    """Create namespaces, bridge and links, and bring everything up."""
    hosts, fabric = list(addresses), netns(name, FABRIC)
    uplink = next(iter(addresses.values())).rpartition(".")[0] + f".{UPLINK_ADDRESS}"
    lines = [f"netns add {netns(name, host)}" for host in (FABRIC, *hosts)]
    pair = "link add name {} netns {} type veth peer name {} netns {}".format
    lines += [pair(host, fabric, "eth0", netns(name, host)) for host in hosts]
    # Every pair has one end in the fabric, so that it vanishes with it.
    lines += [pair("uplink", fabric, uplink_name(name), os.getpid())]
    lines += [f"addr add {uplink}/24 dev {uplink_name(name)}", f"link set {uplink_name(name)} up"]
    batch(lines, keep_fds=keep_fds)
    ports = [*hosts, "uplink"]
    lines = ["link add name br0 type bridge", "link set br0 up"]
    batch(lines + [f"link set {port} master br0 up" for port in ports], fabric, keep_fds)
    for host, address in addresses.items():
        batch(["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"], netns(name, host), keep_fds)


def uplink_name(name):
    """The launch host's interface into the cluster."""
    return f"mc-{name}"


def remove(name):
    """Delete the namespaces, and with them every link; fine if some or all are gone."""
    if Path("/sys/class/net", uplink_name(name)).exists():
        # The kernel removes it some time after its namespace: too late for an `up` that follows at once.
        attempt(["ip", "link", "del", uplink_name(name)])
    for path in existing(name).values():
        if attempt(["ip", "netns", "del", path.name]).returncode:
            # Killed between the creation of the file and the mount over it.
            path.unlink(missing_ok=True)


def set_link(name, node, up):
    """Plug or pull the node's cable, at the bridge: the node itself only sees the carrier go."""
    ip("-n", netns(name, FABRIC), "link", "set", node, "up" if up else "down")


def limit(name, node, rate):
    """Shape the node's traffic in both directions to `rate` (tc's notation, such as 100mbit), or lift it with None."""
    if rate is not None and not re.fullmatch(r"\d+(\.\d+)?([kmgt]?(bit|bps))", rate.lower()):
        raise MiniError(f"limit {node} {rate}: is not a rate; write for example 100mbit, 1gbit, 12mbps (bytes), or off")
    for space, device in ((netns(name, node), "eth0"), (netns(name, FABRIC), node)):
        attempt(["tc", "-n", space, "qdisc", "del", "dev", device, "root"])
        if rate is not None:
            # The bucket must hold what flows between two timer ticks, and a whole segment of 64 KB.
            burst = max(65536, int(bytes_per_second(rate) / 100))
            words = f"qdisc add dev {device} root tbf rate {rate} burst {burst} latency 50ms"
            checked(["tc", "-n", space, *words.split()])


def bytes_per_second(rate):
    """tc's rate notation in numbers."""
    number, prefix, unit = re.fullmatch(r"([\d.]+)([kmgt]?)(bit|bps)", rate.lower()).groups()
    scale = 1000 ** " kmgt".index(prefix or " ")
    return float(number) * scale / (8 if unit == "bit" else 1)


def ip(*words):
    """Run `ip` and return what it prints."""
    return checked(["ip", *words])


def batch(lines, space=None, keep_fds=()):
    """Run many `ip` commands in one process, inside network namespace `space`."""
    command = ["ip", *(["-n", space] if space else []), "-batch", "-"]
    return checked(command, input="\n".join(lines) + "\n", pass_fds=keep_fds)
