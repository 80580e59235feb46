"""One choice in the words of each library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dthpc.comm.fabric.classify import stem
from dthpc.comm.fabric.model import NodeNetwork


def translate(
    fabric: str,
    interface: str | None,
    rails: Sequence[str],
    devices: Mapping[str, str],
    node: NodeNetwork,
) -> dict[str, str]:
    """Variables that make Gloo, NCCL, UCX, libfabric, Open MPI and MPICH use what was chosen.

    Args:
        fabric: what carries the ranks.
        interface: the one interface.
        rails: all interfaces of that network on the node.
        devices: variables that name the RDMA devices that may be used.
        node: where it is.
    """
    made: dict[str, str] = {}
    if interface is not None:
        made["GLOO_SOCKET_IFNAME"] = interface  # one whole name
        made["NCCL_SOCKET_IFNAME"] = nccl_names(rails or [interface], node)
        # Tensor transport of RPC, and providers of libfabric that speak TCP, also take one name.
        made["TP_SOCKET_IFNAME"] = interface
        made["FI_TCP_IFACE"] = interface  # fi_tcp(7)
        made["OMPI_MCA_btl_tcp_if_include"] = interface  # Open MPI, "TCP BTL"
    if fabric in ("infiniband", "roce") and devices:
        made.update(devices)
    elif fabric == "tcp" and interface is not None:
        made["UCX_NET_DEVICES"] = interface
    return made


def nccl_names(rails: Sequence[str], node: NodeNetwork) -> str:
    """The value of NCCL_SOCKET_IFNAME: whole names, or a prefix that takes exactly several rails.

    A bare name is a prefix, which would take VLANs on top of it too.
    """
    shared = {stem(rail) for rail in rails}
    if len(rails) > 1 and len(shared) == 1:
        prefix = shared.pop()
        if prefix and {name for name in node.interfaces if name.startswith(prefix)} == set(rails):
            return prefix
    return "=" + ",".join(rails)
