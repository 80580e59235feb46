"""Which RDMA devices of the nodes carry ranks, and what each library calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dthpc.comm.fabric.classify import is_set_aside
from dthpc.comm.fabric.model import FabricDevice, NodeNetwork
from dthpc.placement.plan.nics import fabric_of
from dthpc.placement.problem import Problem
from dthpc.placement.topology import Topology

FABRICS = ("infiniband", "roce", "slingshot", "efa", "tcp")
"""Fabrics that there are presets for; `omnipath` is recognised too, and left to its libraries."""

_KIND_TO_FABRIC = {"infiniband": "infiniband", "roce": "roce", "slingshot": "slingshot", "efa": "efa"}


@dataclass(frozen=True)
class DeviceChoice:
    """What a node sends RDMA over."""

    fabric: str
    """One of `FABRICS`, or `omnipath`; `tcp` where there is no device that may be used."""

    devices: tuple[FabricDevice, ...]
    rejected: Mapping[str, str]
    """Devices that are not used, with the reason."""

    @cached_property
    def words(self) -> dict[str, str]:
        """The variables that name InfiniBand or RoCE devices."""
        if not self.devices:
            return {}
        return {
            "NCCL_IB_HCA": "=" + ports_of(self.devices, always=False),
            "UCX_NET_DEVICES": ports_of(self.devices, always=True),
        }

    def names(self) -> list[str]:
        return [device.name for device in self.devices]


def choose_devices(node: NodeNetwork) -> DeviceChoice:
    """The devices of a node that ranks may send over: of one kind, up, not set aside, not much slower than the others.

    Which kind and which rates is the rule of the placement, which deals the same devices to ranks.
    """
    rejected = {device.name: reason for device in node.devices if (reason := device.why_not() or _kept(device))}
    left = [device for device in node.devices if device.name not in rejected]
    nics, _ = fabric_of(Topology(nics=tuple(device.nic for device in left)), {device.name: {} for device in left})
    taken = tuple(device for device in left if device.nic in nics and device.kind != "ethernet")
    for device in left:
        if device not in taken:
            rejected[device.name] = f"other devices carry more ({device.kind or 'kind not known'})"
    kinds = {_fabric(device) for device in taken}
    return DeviceChoice(kinds.pop() if len(kinds) == 1 else "tcp", taken if taken else (), rejected)


def _fabric(device: FabricDevice) -> str:
    if device.kind == "omnipath":
        return "omnipath"
    return _KIND_TO_FABRIC.get(device.kind or "", "infiniband")


def _kept(device: FabricDevice) -> str | None:
    kept = [reason for name in device.nic.interfaces or () if (reason := is_set_aside(name))]
    return kept[0] if kept and len(kept) == len(device.nic.interfaces or ()) else None


def ports_of(devices: Sequence[FabricDevice], always: bool) -> str:
    """`mlx5_0:1,mlx5_1:1`.

    Args:
        devices: in their order.
        always: whether the number is given for devices of one port too, as UCX wants it.
    """
    words = []
    for device in devices:
        numbers = [port.number for port in device.ports]
        several = always or len(device.nic.ports or ()) > 1
        words += [f"{device.name}:{number}" for number in numbers or [1]] if several else [device.name]
    return ",".join(words)


def same_fabric(choices: Mapping[str, DeviceChoice]) -> tuple[str, list[Problem]]:
    """The fabric that all nodes have, and the difference where they do not agree.

    Args:
        choices: of each node.
    """
    by_fabric: dict[str, list[str]] = {}
    for node, choice in choices.items():
        by_fabric.setdefault(choice.fabric, []).append(node)
    if len(by_fabric) <= 1:
        fabric = next(iter(by_fabric), "tcp")
        return fabric, _counts(choices) if fabric != "tcp" else []
    most = max(by_fabric, key=lambda fabric: (fabric != "tcp", len(by_fabric[fabric])))
    problems = []
    for fabric, nodes in by_fabric.items():
        if fabric == most:
            continue
        for node in nodes[:8]:
            reasons = "; ".join(f"{name}: {why}" for name, why in choices[node].rejected.items()) or "no such device"
            more = f" (and {len(nodes) - 8} more nodes)" if len(nodes) > 8 and node == nodes[7] else ""
            problems.append(
                Problem(
                    "error",
                    f"{node} has no usable {most}{more}",
                    f"{len(by_fabric[most])} other nodes have it, and ranks on both would not find a way ({reasons})",
                    f"mend the link or leave the node out (cluster.exclude={node}); comm=tcp sends over TCP everywhere",
                    node,
                )
            )
    return "tcp", problems


def _counts(choices: Mapping[str, DeviceChoice]) -> list[Problem]:
    counts = {node: len(choice.devices) for node, choice in choices.items()}
    most = max(counts.values())
    few = [node for node, count in counts.items() if count < most]
    if not few:
        return []
    told = ", ".join(f"{node} {counts[node]} ({', '.join(choices[node].names())})" for node in few[:8])
    return [
        Problem(
            "warning",
            f"not all nodes have {most} usable devices: {told}",
            "ranks there set the pace of all collectives",
            "look for links that are down: `ibstat`, `ip -br link`",
        )
    ]
