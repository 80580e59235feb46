"""What an interface is for: carrying ranks, or something that must never be taken for it."""

from __future__ import annotations

import re
from functools import lru_cache

from dthpc.comm.fabric.model import Interface, NodeNetwork

_CONTAINERS = re.compile(
    r"docker|br-[0-9a-f]{5,12}$|veth(?!\d{1,2}$)|cni\d|cni-|cbr\d|cali[0-9a-f]|cilium|lxc|lxd|incusbr|podman|nerdctl|kube|nodelocaldns|"
    r"flannel|weave|vxlan|geneve?|genev_|ovs-|ovn|antrea|azv[0-9a-f]|eni[0-9a-f]{8,}$|gke[0-9a-f]{8,}|crio|virbr|vnet\d|vmnet|vboxnet|"
    r"fw(?:br|pr|ln)\d|tap\d|tap-|isula"
)
_TUNNELS = re.compile(
    r"(?:tun|utun|tunl|ppp|gre|gretap|erspan|sit|ip6tnl|ip6gre|ip6_vti|ip_vti|wg|gif|stf|awdl|llw|ipsec|nebula)[\d_-]*$|"
    r"wg[-_\d]|zt[0-9a-z]{8}|tailscale"
)
_OTHER = re.compile(r"(?:dummy|ifb|teql|nlmon|vcan|can|tmfifo_net|rshim|anpi|ap)\d*$")
_MANAGEMENT = re.compile(r"(?:nmn|hmn|cmn|bmc|ipmi|idrac|ilo|imm|xcc|mgmt?|mgt|management|oob|rndis)[\w.]*$", re.I)
_STORAGE = re.compile(r"(?:stor(?:age)?|nfs|lustre|lnet|beegfs|gpfs|ceph|iscsi)[\w.]*$", re.I)
_HIGH_SPEED = re.compile(r"(?:hsn\d|ib\d|ib[psof]\d|ibP\d|ipoib|opa?\d|bond[-_]?ib|ib[-_]?bond)")
_BRIDGE = re.compile(r"(?:br\d|br[-_]|bridge|vmbr|xenbr|ovsbr|br$)")
_USB = re.compile(r"(?:usb\d|enx[0-9a-f]{12}$|en[opsx]\w*u\d)")
_WIRELESS = re.compile(r"(?:wl|wifi|ath\d|ra\d|wwan|wwp|wwx)")
_USB_DRIVERS = ("cdc_ether", "cdc_ncm", "cdc_eem", "rndis_host")

_KINDS = {
    "veth": None,  # a container's own end of its network
    "tun": "a tunnel",
    "ipip": "a tunnel",
    "sit": "a tunnel",
    "gre": "a tunnel",
    "gretap": "a tunnel",
    "ip6tnl": "a tunnel",
    "ip6gre": "a tunnel",
    "vti": "a tunnel",
    "wireguard": "a VPN",
    "vxlan": "an overlay of a container network",
    "geneve": "an overlay of a container network",
    "dummy": "a dummy device",
    "ifb": "a device for shaping traffic",
    "vrf": "a routing domain",
    "openvswitch": "a virtual switch",
}

FABRIC, ROCE, WIRED, SHARED, USB, WIRELESS = 5, 4, 3, 2, 1, 0
"""Classes of interfaces that may carry ranks, the better the higher: a high-speed network, Ethernet of an RDMA adapter,
Ethernet, a VLAN or bridge on top of one that would do, a USB card, radio."""


def why_not(interface: Interface, node: NodeNetwork) -> str | None:
    """Why the ranks must not use an interface, or `None` if they may.

    What is not told (a log has no flags) does not speak against it.
    """
    return (
        _loopback(interface)
        or _by_name(interface)
        or _port(interface, node)
        or _bridge(interface, node)
        or _down(interface)
        or _no_address(interface, node)
    )


def class_of(interface: Interface, node: NodeNetwork) -> int:
    """How good an interface that may be used is, one of `FABRIC` to `WIRELESS`."""
    name = interface.name
    if is_high_speed(interface):
        return FABRIC
    if _WIRELESS.match(name):
        return WIRELESS
    if _USB.match(name):
        return USB
    if _is_bridge(interface):
        return SHARED
    below = _below(interface, node)
    if below is not None and below.routable and why_not(below, node) is None:
        return SHARED
    kinds = {device.kind for device in node.devices if name in (device.nic.interfaces or ())}
    return ROCE if kinds & {"roce", "slingshot"} else WIRED


def is_high_speed(interface: Interface) -> bool:
    """Whether it is of Slingshot, InfiniBand or Omni-Path."""
    if interface.link == "infiniband" or interface.kind == "ipoib":
        return True
    return bool(_HIGH_SPEED.match(interface.name))


def is_set_aside(name: str) -> str | None:
    """What an interface's name says that it is kept for (management, storage), or `None`."""
    if _MANAGEMENT.match(name):
        return "of the management network"
    return "of the storage network" if _STORAGE.match(name) else None


def is_untold(interface: Interface, node: NodeNetwork) -> bool:
    """Whether a text that gives no addresses at all (`ip link`, `ifconfig -s`) tells only that the interface is up."""
    if node.live or interface.up is False or interface.addresses or interface.hidden:
        return False
    return not any(each.addresses or each.hidden for each in node.interfaces.values())


def stem(name: str) -> str:
    """The name without its number: `hsn` of `hsn0`."""
    return name.rstrip("0123456789")


def _loopback(interface: Interface) -> str | None:
    loopback = interface.link == "loopback" or "LOOPBACK" in (interface.flags or ())
    return "loopback" if loopback or re.fullmatch(r"lo(?:opback)?\d*", interface.name) else None


def _by_name(interface: Interface) -> str | None:
    return _by_names(interface.name, interface.kind, interface.driver, is_high_speed(interface))


@lru_cache(maxsize=1024)
def _by_names(name: str, kind: str | None, driver: str | None, high_speed: bool) -> str | None:
    """The same of plain words: the nodes of a cluster ask of the same few."""
    if _CONTAINERS.match(name):
        return "made by a container engine or hypervisor; its addresses are often the same on every machine"
    if _TUNNELS.match(name) and not high_speed:
        return "a tunnel"
    if _OTHER.match(name):
        return "no network card"
    if driver in _USB_DRIVERS:
        return "the management controller's USB card"
    if kept := is_set_aside(name):
        return kept
    return _KINDS.get(kind or "")


def _port(interface: Interface, node: NodeNetwork) -> str | None:
    master = node.interfaces.get(interface.master or "")
    own = interface.master is not None and bool(interface.routable)
    if "SLAVE" not in (interface.flags or ()) and (
        interface.master is None or (own and (master is None or master.kind in (None, "vrf")))
    ):
        return None
    if interface.master is None:
        return "a port of a bond"
    absent = "" if interface.master in node.interfaces else ", which is not in this text"
    return f"a port of {interface.master}{absent}"


def _is_bridge(interface: Interface) -> bool:
    return interface.kind in ("bridge", "openvswitch") or bool(_BRIDGE.match(interface.name))


def _bridge(interface: Interface, node: NodeNetwork) -> str | None:
    """A bridge carries ranks where a card is a port of it: then the node's address is the bridge's."""
    if not _is_bridge(interface):
        return None
    # All ports of Open vSwitch have its one system device as master; br-ex is the bridge that stands for the node.
    masters = {interface.name, *(["ovs-system"] if interface.name == "br-ex" else [])}
    ports = [each for each in node.interfaces.values() if each.master in masters]
    if not ports and not any(each.master for each in node.interfaces.values()):
        # Texts without masters: cards that are up and have no address of their own.
        ports = [each for each in node.interfaces.values() if each.up and not each.routable and each != interface]
    if any(_loopback(port) is None and _by_name(port) is None for port in ports):
        return None
    return "a bridge that no network card is known to be a port of"


def _below(interface: Interface, node: NodeNetwork) -> Interface | None:
    """The interface that a VLAN, macvlan or child of InfiniBand is on top of."""
    if interface.parent is not None and interface.parent in node.interfaces:
        return node.interfaces[interface.parent]
    base, dot, _ = interface.name.rpartition(".")
    return node.interfaces.get(base) if dot else None


def _down(interface: Interface) -> str | None:
    if interface.up is not False:
        return None
    flags = interface.flags or ()
    if "NO-CARRIER" in flags:
        return "down: no carrier"
    return "down: it has no carrier" if "UP" in flags else "down"


def _no_address(interface: Interface, node: NodeNetwork) -> str | None:
    if interface.routable or interface.hidden or is_untold(interface, node):
        return None
    if any(address.ip.is_link_local for address in interface.ipv4):
        return "it has a link-local address alone (169.254.0.0/16: a management controller or an internal USB card)"
    return "it has a link-local address alone" if interface.addresses else "it has no address"
