"""NCCL's and RCCL's topology files (`NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

from dthpc.placement.cpuset import CpuSet, parse_mask
from dthpc.placement.read import pci
from dthpc.placement.read.text import refuse
from dthpc.placement.topology import Gpu, Link, Nic, NumaNode, Port, Source, Topology, bus_id

KIND = "nccl topology"
INSTEAD = "let NCCL write it with NCCL_TOPO_DUMP_FILE=topo.xml"

_LINKS = {"nvlink": "nvlink", "xgmi": "xgmi", "c2c": "c2c"}


def read_nccl_xml(text: str, where: str = "NCCL topology file") -> Topology:
    """The node of a topology file of NCCL. A `pci` within a `pci` stands for a whole switch.

    Raises:
        UserError: the text is no whole XML file of NCCL.
    """
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise refuse(where, f"the XML is cut or damaged ({error})", text[-80:], INSTEAD) from error
    if root.tag == "graphs" or root.find("cpu") is None:
        raise refuse(where, "the XML is not a topology of NCCL: it has no system with CPUs", text[:80], INSTEAD)
    return _Reader(root, where).read()


class _Reader:
    """Walks the tree once."""

    def __init__(self, root: ElementTree.Element, where: str) -> None:
        self.root = root
        self.where = where
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.switches: list[str] = []
        self.links: list[tuple[str, ElementTree.Element]] = []

    def read(self) -> Topology:
        nodes = []
        for place, cpu in enumerate(self.root.findall("cpu")):
            number = int(cpu.get("numaid", "-1"))
            cpus = parse_mask(cpu.get("affinity", "0"), where=f"{self.where}: affinity") or None
            numa = number if number >= 0 else None
            if numa is not None:
                nodes.append(NumaNode(numa, cpus))
            for child in cpu:
                self._visit(child, numa, cpus, (f"cpu {place}",))
        return Topology(
            numa=tuple(nodes) or None,
            gpus=tuple(self.gpus),
            nics=tuple(self.nics),
            links=tuple(self._links()) or None,
            switches=tuple(self.switches),
            sources=(Source(KIND, self.where, ("numa", "gpus", "nics", "links")),),
        )

    def _visit(
        self, element: ElementTree.Element, numa: int | None, cpus: CpuSet | None, path: tuple[str, ...]
    ) -> None:
        near = (numa,) if numa is not None else None
        if element.tag == "nic":
            # A NIC that hangs from the CPU itself has no bus id, and its way to the GPUs is through the processor.
            self.nics += self._nets(element, "", Nic("", numa=near, cpus=cpus, pcie=path))
        if element.tag != "pci":
            return
        written = element.get("busid", "")
        address = bus_id(written) or written
        kind = element.get("class", "").lower().removeprefix("0x")[:4]
        gpu, nic = element.find("gpu"), element.find("nic")
        if gpu is not None or (kind[:2] in ("03", "12") and nic is None):
            known = Gpu(address, bus_id=address, numa=near, cpus=cpus, pcie=path)
            self.gpus.append(self._gpu(element, gpu, known))
        elif nic is not None or kind[:2] == "02":
            shared = Nic("", bus_id=address, numa=near, cpus=cpus, pcie=path)
            self.nics += self._nets(nic if nic is not None else element, kind, shared, element)
        else:
            self.switches.append(address)
            for child in element:
                self._visit(child, numa, cpus, (*path, address))

    def _gpu(self, element: ElementTree.Element, gpu: ElementTree.Element | None, known: Gpu) -> Gpu:
        number = gpu.get("dev") if gpu is not None else None
        index = int(number) if number is not None and number.isdigit() else None
        key = known.key if index is None else f"GPU{index}"
        vendor = element.get("vendor", "").lower().removeprefix("0x")
        if gpu is not None:
            self.links += [(key, child) for child in gpu if child.tag in _LINKS]
        if not vendor and gpu is not None:
            vendor = "1002" if gpu.get("gcn") else "10de"
        return replace(known, key=key, index=index, vendor=pci.VENDORS.get(vendor, vendor or None), compute=True)

    def _nets(
        self, nic: ElementTree.Element, kind: str, shared: Nic, element: ElementTree.Element | None = None
    ) -> Iterator[Nic]:
        vendor, device = (
            (element.get(name, "").lower().removeprefix("0x") for name in ("vendor", "device"))
            if element is not None
            else ("", "")
        )
        ports: dict[str, list[Port]] = {}
        for net in nic.findall("net"):
            speed = float(net.get("speed", "0"))
            port = Port(int(net.get("port", "1")), rate_gbps=speed / 1000 if speed > 0 else None)
            ports.setdefault(net.get("name", ""), []).append(port)
        for name in ports or [shared.bus_id or ""]:
            # Sockets are shown by the name of the interface, RDMA devices by their own.
            guid = any(
                net.get("guid", "0x0") not in ("0x0", "0") for net in nic.findall("net") if net.get("name") == name
            )
            rdma = [name] if guid and ports else []
            yield replace(
                shared,
                name=name,
                kind=pci.nic_kind(kind, vendor, device, rdma, []) if kind or rdma else pci.named_kind([name]),
                ports=tuple(ports[name]) if name in ports else None,
                rdma=bool(rdma) if ports else None,
            )

    def _links(self) -> Iterator[Link]:
        keys = {gpu.bus_id: gpu.key for gpu in self.gpus}
        switched: dict[str, int] = {}
        seen: set[frozenset[str]] = set()
        for key, link in self.links:
            target = keys.get(bus_id(link.get("target", "")))
            if target is not None and frozenset((key, target)) not in seen:
                seen.add(frozenset((key, target)))
                yield Link(key, target, kind=_LINKS[link.tag], lanes=int(link.get("count", "1")))
            elif target is None and link.tag == "nvlink" and link.get("tclass", "").startswith("0x0680"):
                switched[key] = switched.get(key, 0) + int(link.get("count", "1"))
        # NVLink to NVSwitches reaches every other GPU that has links to them.
        members = sorted(switched)
        for place, a in enumerate(members):
            for b in members[place + 1 :]:
                if frozenset((a, b)) not in seen:
                    yield Link(a, b, kind="nvlink", lanes=min(switched[a], switched[b]))
