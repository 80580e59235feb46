"""hwloc's XML (`lstopo --of xml`), versions 1 to 3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, parse_mask
from dthpc.placement.read import pci
from dthpc.placement.read.hwloc_distances import device_links, numa_distances
from dthpc.placement.read.text import refuse
from dthpc.placement.topology import Cache, Core, Gpu, Nic, NumaNode, Package, Port, Source, Topology, bus_id

KIND = "hwloc"
INSTEAD = "save the whole topology with `lstopo --of xml node.xml`"

_COMPUTE = re.compile(r"cuda\d|nvml\d|rsmi\d|ze\d|opencl\d")
_INDEXED = re.compile(r"(?:nvml|rsmi|ze)(\d+)")
_NETWORK = {"1": (2, 3), "2": (2, 3), "3": (16, 32)}
"""Numbers of network and RDMA devices among `osdev_type`: a plain number before version 3, bits from there on."""


@dataclass(frozen=True)
class _Place:
    """Where in the tree an I/O object hangs."""

    cpus: CpuSet | None
    path: tuple[str, ...]


def read_hwloc(text: str, where: str = "lstopo --of xml") -> Topology:
    """The node of an hwloc XML file.

    CPU sets of memory nodes are hwloc's: in versions 2 and 3 a node of memory alone lists the CPUs that it is attached
    to, so that several nodes may list the same CPUs.

    Raises:
        UserError: the text is no whole XML file of hwloc.
    """
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise refuse(where, f"the XML is cut or damaged ({error})", text[-80:], INSTEAD) from error
    machine = root.find("object")
    if root.tag != "topology" or machine is None:
        raise refuse(where, "the XML is not hwloc's: it has no topology with objects", text[:80], INSTEAD)
    return _Reader(root, machine, where).read()


class _Reader:
    """Walks the tree of objects once."""

    def __init__(self, root: ElementTree.Element, machine: ElementTree.Element, where: str) -> None:
        self.root = root
        self.machine = machine
        self.where = where
        self.version = (root.get("version") or "1").split(".")[0]
        self.packages: list[Package] = []
        self.numa: list[NumaNode] = []
        self.caches: dict[int, list[Cache]] = {}
        self.cores: list[Core] = []
        self.pus: set[int] = set()
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.bridges: list[str] = []
        self.numbers: dict[str, str] = {}
        """Key of a GPU, or bus id of another function, by the numbers that distances use."""

    def read(self) -> Topology:
        self._visit(self.machine, None, _Place(None, ()))
        existing = frozenset(self.pus)
        online = self._set(self.machine, "online_cpuset")
        if online is not None:
            existing &= online
        allowed = self._set(self.machine, "allowed_cpuset")
        numa = numa_distances(self.root, sorted(self.numa, key=lambda node: node.index))
        links, compute = device_links(self.root, self.numbers), any(gpu.compute for gpu in self.gpus)
        deepest = max((level for level in self.caches if level > 1), default=None)
        memory = self._set(self.machine, "allowed_nodeset")
        return Topology(
            host=self._info(self.machine).get("HostName"),
            existing=existing,
            allowed=None if allowed is None else allowed & existing,
            allowed_memory=memory,
            packages=tuple(self.packages),
            numa=tuple(numa) or None,
            caches=tuple(self.caches[deepest]) if deepest is not None else (),
            cores=tuple(self._cores()),
            gpus=tuple(replace(g, numa=self._near(g.cpus), compute=g.compute if compute else None) for g in self.gpus),
            nics=tuple(replace(nic, numa=self._near(nic.cpus)) for nic in self.nics),
            links=tuple(links) or None,
            switches=tuple(self.bridges),
            sources=(Source(KIND, self.where, ("cpus", "packages", "numa", "caches", "cores", "gpus", "nics")),),
            notes=() if numa else ("hwloc shows no memory nodes (one memory for all)",),
        )

    def _visit(self, element: ElementTree.Element, package: int | None, place: _Place) -> None:
        kind = element.get("type", "")
        cpus = self._set(element, "cpuset")
        if cpus is not None:
            place = _Place(cpus, ())
        index = int(element.get("os_index", "-1"))
        if kind in ("Package", "Socket"):
            package = index
            self.packages.append(Package(index, cpus))
        elif kind in ("NUMANode", "Node"):
            self.numa.append(NumaNode(index, cpus, int(element.get("local_memory", "0")), package))
        elif kind == "Core":
            self.cores.append(Core(cpus or frozenset(), index if index >= 0 else None, package))
        elif kind in ("PU", "Proc"):
            self.pus.add(index)
        elif kind == "Cache" or re.fullmatch(r"L\dCache", kind):
            level = int(element.get("depth", "0")) if kind == "Cache" else int(kind[1])
            size = int(element.get("cache_size", "0"))
            self.caches.setdefault(level, []).append(Cache(cpus or frozenset(), size or None))
        elif kind == "Bridge":
            place = self._bridge(element, place)
        elif kind == "PCIDev":
            self._function(element, place)
        for child in element.findall("object"):
            self._visit(child, package, place)

    def _bridge(self, element: ElementTree.Element, place: _Place) -> _Place:
        own = element.get("pci_busid")
        if own is None:
            return _Place(place.cpus, (f"host {element.get('bridge_pci', '')}",))
        self.bridges.append(bus_id(own) or own)
        return _Place(place.cpus, (*place.path, bus_id(own) or own))

    def _function(self, element: ElementTree.Element, place: _Place) -> None:
        kind, vendor, device = _pci_type(element)
        devices = [child for child in element.iter("object") if child.get("type") == "OSDev"]
        names = [child.get("name", "") for child in devices]
        compute = any(_COMPUTE.match(name) for name in names)
        address = bus_id(element.get("pci_busid", "")) or ""
        rdma = [child for child in devices if self._is(child, 1)]
        interfaces = [child.get("name", "") for child in devices if self._is(child, 0) and child not in rdma]
        key = address
        if pci.is_gpu(kind, vendor, compute):
            gpu = self._gpu(address, vendor, devices, place, compute)
            key = gpu.key
            self.gpus.append(gpu)
        elif pci.is_nic(kind, [child.get("name", "") for child in rdma], interfaces):
            self.nics.append(self._nic(address, (kind, vendor, device), rdma, interfaces, element, place))
        for child in (element, *devices):
            self.numbers[f"{child.get('type')}:{child.get('gp_index')}"] = key

    def _is(self, element: ElementTree.Element, which: int) -> bool:
        """Whether an operating-system device is a network interface (0) or an RDMA device (1)."""
        number = int(element.get("osdev_type", "0"))
        wanted = _NETWORK["3" if self.version >= "3" else "2"][which]
        return bool(number & wanted) if self.version >= "3" else number == wanted

    def _gpu(
        self, address: str, vendor: str, devices: Sequence[ElementTree.Element], place: _Place, compute: bool
    ) -> Gpu:
        names = [child.get("name", "") for child in devices]
        infos = {key: value for child in devices for key, value in self._info(child).items()}
        # CUDA's numbers follow what the process could see; those of the management libraries do not.
        number = next((int(match[1]) for name in names if (match := _INDEXED.match(name))), None)
        memory = infos.get("CUDAGlobalMemorySize") or infos.get("OpenCLGlobalMemorySize")
        return Gpu(
            key=address if number is None else f"GPU{number}",
            index=number,
            bus_id=address,
            uuid=next((infos[key] for key in ("NVIDIAUUID", "AMDUUID", "LevelZeroUUID") if key in infos), None),
            vendor=pci.VENDORS.get(vendor, vendor),
            model=infos.get("GPUModel"),
            compute=compute,
            cpus=place.cpus,
            memory_bytes=int(memory) * 1024 if memory and memory.isdigit() else None,
            pcie=place.path or None,
            devices=tuple(names),
        )

    def _nic(
        self,
        address: str,
        numbers: tuple[str, str, str],
        rdma: Sequence[ElementTree.Element],
        interfaces: Sequence[str],
        element: ElementTree.Element,
        place: _Place,
    ) -> Nic:
        names = [child.get("name", "") for child in rdma]
        title = self._info(element).get("PCIDevice")
        ports = tuple(port for child in rdma for port in _ports(self._info(child)))
        return Nic(
            name=[*names, *interfaces][0],
            kind=pci.nic_kind(*numbers, names, interfaces),
            bus_id=address,
            interfaces=tuple(interfaces),
            ports=ports or None,
            cpus=place.cpus,
            virtual=True if title and "Virtual Function" in title else None,
            rdma=bool(names),
            model=title,
            pcie=place.path or None,
        )

    def _near(self, cpus: CpuSet | None) -> tuple[int, ...] | None:
        """The memory nodes of the CPUs that a device hangs from."""
        near = [node.index for node in self.numa if node.cpus and node.cpus <= (cpus or frozenset())]
        return tuple(sorted(near)) or None

    def _cores(self) -> Iterator[Core]:
        """The cores; on a machine with two kinds, which of them are the slower."""
        slow: set[int] = set()
        kinds = [(self._set(kind, "cpuset") or frozenset(), self._info(kind)) for kind in self.root.findall("cpukind")]
        if any(infos.get("CoreType") == "IntelAtom" for _, infos in kinds):
            slow = {cpu for cpus, infos in kinds if infos.get("CoreType") == "IntelAtom" for cpu in cpus}
        elif len(capacities := {int(infos["LinuxCapacity"]) for _, infos in kinds if "LinuxCapacity" in infos}) > 1:
            fastest = str(max(capacities))
            slow = {cpu for cpus, infos in kinds if infos.get("LinuxCapacity", fastest) != fastest for cpu in cpus}
        for core in self.cores:
            yield replace(core, efficient=bool(core.cpus & slow)) if slow else core

    def _info(self, element: ElementTree.Element) -> dict[str, str]:
        return {info.get("name", ""): info.get("value", "") for info in element.findall("info")}

    def _set(self, element: ElementTree.Element, name: str) -> CpuSet | None:
        text = element.get(name)
        if text is None:
            return None
        try:
            return parse_mask(text, where=f"{self.where}: {name}")
        except UserError as error:
            if "without end" in error.why:
                return None
            raise


def _pci_type(element: ElementTree.Element) -> tuple[str, str, str]:
    """Class, maker and model of `0207 [15b3:1013] [15b3:0013] 00`."""
    match = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", element.get("pci_type", "").lower())
    return (match[1], match[2], match[3]) if match else ("", "", "")


def _ports(infos: dict[str, str]) -> Iterator[Port]:
    for name, value in infos.items():
        match = re.fullmatch(r"Port(\d+)State", name)
        if match and value.isdigit():
            yield Port(int(match[1]), state=pci.IB_STATES.get(int(value)))
