"""GPUs and network adapters in `/sys/bus/pci` and `/sys/class`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dthpc.placement.cpuset import CpuSet, parse_cpus, parse_mask
from dthpc.placement.read import pci
from dthpc.placement.read.tree import Tree
from dthpc.placement.topology import Gpu, Nic, NumaNode, Port

_PCI = "sys/bus/pci/devices"


def read_gpus(tree: Tree, numa: Sequence[NumaNode]) -> Iterator[Gpu]:
    """The GPUs, by bus id: the kernel knows neither the numbers of the vendor's tools nor its links."""
    with_cpus = {node.index for node in numa if node.cpus}
    for address, kind, vendor in _functions(tree):
        if not pci.is_gpu(kind, vendor):
            continue
        base = f"{_PCI}/{address}"
        node = _node(tree, base)
        own = re.search(r"^Node:\s*(\d+)", tree.read(f"proc/driver/nvidia/gpus/{address}/numa_status") or "", re.M)
        yield Gpu(
            key=address,
            bus_id=address,
            vendor=pci.VENDORS.get(vendor, vendor),
            numa=(node,) if node is not None and node in with_cpus else None,
            cpus=_local(tree, base),
            memory_numa=int(own[1]) if own else None,
            pcie=_path(tree, base),
            devices=tuple(sorted(tree.names(f"{base}/drm"))),
        )


def read_nics(tree: Tree) -> Iterator[Nic]:
    """The adapters, one for each PCI function, and those that stand on no PCI bus (on-chip, virtual machines)."""
    functions = {address: (kind, vendor) for address, kind, vendor in _functions(tree)}
    devices = dict(_of_class(tree, "net"))
    rdma = dict(_of_class(tree, "infiniband"))
    for address, (kind, vendor) in functions.items():
        own = _own(tree, address, "infiniband", rdma)
        interfaces = _own(tree, address, "net", devices)
        if not pci.is_nic(kind, own, interfaces):
            continue
        base = f"{_PCI}/{address}"
        device = (tree.read(f"{base}/device") or "")[-4:].lower()
        ports = [port for name in own for port in _rdma_ports(tree, name)] or _net_ports(tree, interfaces)
        layers = {port.link_layer for port in ports if port.link_layer}
        node = _node(tree, base)
        yield Nic(
            name=[*own, *interfaces][0],
            kind=pci.nic_kind(kind, vendor, device, own, interfaces, layers),
            bus_id=address,
            interfaces=tuple(interfaces),
            interfaces_up=tuple(name for name in interfaces if _state(tree, name) == "up"),
            ports=tuple(ports) or None,
            numa=(node,) if node is not None else None,
            cpus=_local(tree, base),
            virtual=tree.target(f"{base}/physfn") is not None,
            rdma=bool(own),
            pcie=_path(tree, base),
        )


def switches_of(devices: Sequence[Gpu | Nic]) -> tuple[str, ...]:
    """The bridges and switches above the devices, each once."""
    return tuple(dict.fromkeys(step for device in devices for step in (device.pcie or ())[1:]))


def _functions(tree: Tree) -> Iterator[tuple[str, str, str]]:
    """Address, class and maker of each PCI function."""
    for address in sorted(tree.names(_PCI)):
        kind = (tree.read(f"{_PCI}/{address}/class") or "").removeprefix("0x")[:4].lower()
        # Reading the maker of what is certainly neither GPU nor adapter would take most of the time.
        if kind[:2] in ("02", "03", "0c", "08", "12", "ff"):
            yield address, kind, (tree.read(f"{_PCI}/{address}/vendor") or "")[-4:].lower()


def _of_class(tree: Tree, name: str) -> Iterator[tuple[str, str]]:
    """Devices of a class, with the PCI function that each belongs to."""
    for device in sorted(tree.names(f"sys/class/{name}")):
        place = tree.target(f"sys/class/{name}/{device}") or tree.target(f"sys/class/{name}/{device}/device") or ""
        found = re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place)
        if found:
            yield device, found[-1]


def _own(tree: Tree, address: str, name: str, by_device: dict[str, str]) -> list[str]:
    """The devices of a class below a function, as numbers order them."""
    listed = tree.names(f"{_PCI}/{address}/{name}")
    own = set(listed) | {device for device, place in by_device.items() if place == address}
    return sorted(
        own, key=lambda device: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", device)]
    )


def _rdma_ports(tree: Tree, name: str) -> Iterator[Port]:
    base = f"sys/class/infiniband/{name}/ports"
    for port in sorted(tree.names(base)):
        state = re.match(r"\d+: (\w+)", tree.read(f"{base}/{port}/state") or "")
        physical = re.match(r"\d+: (\w+)", tree.read(f"{base}/{port}/phys_state") or "")
        rate = re.match(r"([\d.]+) Gb/sec", tree.read(f"{base}/{port}/rate") or "")
        yield Port(
            int(port),
            state=state[1].lower() if state else None,
            physical=physical[1].lower() if physical else None,
            rate_gbps=float(rate[1]) if rate else None,
            link_layer=(tree.read(f"{base}/{port}/link_layer") or "").lower() or None,
        )


def _net_ports(tree: Tree, interfaces: Sequence[str]) -> list[Port]:
    """Ports of an adapter that only the network stack knows: one for each interface."""
    ports = []
    for number, name in enumerate(interfaces, start=1):
        state = _state(tree, name)
        speed = tree.read(f"sys/class/net/{name}/speed") or ""
        rate = int(speed) / 1000 if speed.isdigit() and int(speed) > 0 else None
        ports.append(Port(number, state if state in ("up", "down") else None, rate_gbps=rate, link_layer="ethernet"))
    return ports


def _state(tree: Tree, interface: str) -> str | None:
    return tree.read(f"sys/class/net/{interface}/operstate")


def _node(tree: Tree, base: str) -> int | None:
    """The memory node; the kernel writes -1 where the firmware tells none."""
    text = tree.read(f"{base}/numa_node")
    return int(text) if text and text.isdigit() else None


def _local(tree: Tree, base: str) -> CpuSet | None:
    text = tree.read(f"{base}/local_cpulist")
    if text is not None:
        return parse_cpus(text, f"{tree.where}: {base}/local_cpulist")
    mask = tree.read(f"{base}/local_cpus")
    return parse_mask(mask, f"{tree.where}: {base}/local_cpus") if mask else None


def _path(tree: Tree, base: str) -> tuple[str, ...] | None:
    """Host bridge and bridges above a function, from where sysfs keeps it: `pci0000:40/0000:40:03.0/…`."""
    target = tree.target(base)
    if target is None:
        return None
    steps = target.split("/")[:-1]
    roots = [place for place, step in enumerate(steps) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", step)]
    return tuple(steps[roots[-1] :]) if roots else None
