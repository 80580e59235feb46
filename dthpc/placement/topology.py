"""What is known of one node: its processors, memory, GPUs, network adapters, and how near they are to each other.

No source knows everything (`nvidia-smi topo -m` knows no cores, hwloc no link rates), so that every field may be
unknown: `None` says that nobody told, an empty set or 0 that there is none. Nothing here is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dthpc.placement.cpuset import CpuSet, format_cpus

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""The words of nvidia-smi for how near two devices are by PCIe, nearest first: under one switch (PIX), under several
switches (PXB), under one host bridge (PHB), within one NUMA node (NODE), beyond it (SYS)."""


@dataclass(frozen=True)
class Package:
    """One processor package (socket)."""

    index: int
    cpus: CpuSet | None = None


@dataclass(frozen=True)
class NumaNode:
    """One memory node."""

    index: int
    """The operating system's number; numbers may leave gaps (0 and 8 on POWER)."""

    cpus: CpuSet | None = None
    """CPUs that this node is nearest to; empty for a node of memory alone."""

    memory_bytes: int | None = None
    """Size of its memory; 0 for a node of CPUs alone and for the empty places of a GPU's driver."""

    package: int | None = None

    distances: Mapping[int, int] | None = None
    """Distance to each node by number, in the firmware's unit (10 is itself)."""

    @property
    def has_cpus(self) -> bool | None:
        return None if self.cpus is None else bool(self.cpus)

    @property
    def has_memory(self) -> bool | None:
        return None if self.memory_bytes is None else self.memory_bytes > 0


@dataclass(frozen=True)
class Cache:
    """One cache of the last level, and the CPUs that share it (the L3 domain)."""

    cpus: CpuSet
    size_bytes: int | None = None


@dataclass(frozen=True)
class Core:
    """One core; its CPUs are the hardware threads (SMT siblings) that it runs."""

    cpus: CpuSet
    index: int | None = None
    """Number within its package, as the operating system gives it: not unique in the node."""

    package: int | None = None
    efficient: bool | None = None
    """Whether it is one of the slower cores of a machine with two kinds."""


@dataclass(frozen=True)
class GpuPart:
    """A piece of a GPU that a rank can be given for itself: a MIG instance, a tile of an Intel GPU."""

    kind: str
    """`mig` or `tile`."""

    index: int
    uuid: str | None = None
    profile: str | None = None
    """Such as `1g.5gb`."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver shows it: a whole card, or one die (GCD) of a card of several."""

    key: str
    """Unique in the topology, and what links name: `GPU<index>` where the index is known, else the bus id."""

    index: int | None = None
    """Number in the order of the vendor's tools."""

    bus_id: str | None = None
    """PCI address in full, lower case: `0000:3b:00.0`."""

    uuid: str | None = None
    vendor: str | None = None
    """`nvidia`, `amd`, `intel`, or the PCI number of another."""

    model: str | None = None
    compute: bool | None = None
    """Whether a compute driver (CUDA, ROCm, Level Zero) showed it; display adapters are not."""

    visible: bool | None = None
    """Whether the vendor's tools showed it to this process; false for one that the kernel alone shows."""

    numa: tuple[int, ...] | None = None
    """Memory nodes with CPUs nearest to it: usually one, several where a bus is shared, none where it has no own."""

    cpus: CpuSet | None = None
    """CPUs nearest to it."""

    memory_numa: int | None = None
    """The memory node that its own memory appears as (Grace Hopper, POWER9): never one to bind a rank's memory to."""

    memory_bytes: int | None = None
    module: int | None = None
    """Number of the card or package that holds it together with other dies."""

    parts: tuple[GpuPart, ...] | None = None
    pcie: tuple[str, ...] | None = None
    """What stands between it and the processor, from the root: host bridge, then bus ids of bridges and switches."""

    devices: tuple[str, ...] = ()
    """Names that the operating system gives it: `card0`, `renderD128`, `nvml0`."""


@dataclass(frozen=True)
class Port:
    """One port of a network adapter."""

    number: int
    state: str | None = None
    """Lower case: `active`, `down`, `init`, `armed`; for Ethernet alone `up` or `down` as the interface says."""

    physical: str | None = None
    """Lower case: `linkup`, `polling`, `disabled`, …"""

    rate_gbps: float | None = None
    """Rate in Gbit/s; that of a port which is down means nothing."""

    link_layer: str | None = None
    """`infiniband` or `ethernet`."""

    @property
    def up(self) -> bool | None:
        return None if self.state is None else self.state in ("active", "up")


@dataclass(frozen=True)
class Nic:
    """One network adapter (a PCI function), by the name that RDMA software uses where there is one."""

    name: str
    """`mlx5_0`, `hsn0`, `rdmap16s27`, `eth0`; `NIC0` where the text has no legend; the bus id where nothing else."""

    kind: str | None = None
    """`infiniband`, `roce`, `omnipath`, `slingshot`, `ethernet`, `efa`, `iwarp`, `usnic`, or `software`."""

    bus_id: str | None = None
    interfaces: tuple[str, ...] | None = None
    """Network interfaces (`ib0`, `eth0`) of the adapter."""

    interfaces_up: tuple[str, ...] | None = None
    """Those of the interfaces that are up. InfiniBand's own traffic needs no interface, so that none may be."""

    ports: tuple[Port, ...] | None = None
    numa: tuple[int, ...] | None = None
    cpus: CpuSet | None = None
    virtual: bool | None = None
    """Whether it is a virtual function of another adapter."""

    rdma: bool | None = None
    """Whether it has an RDMA device (so that `name` can be an HCA of NCCL or UCX)."""

    model: str | None = None
    pcie: tuple[str, ...] | None = None

    @property
    def up(self) -> bool | None:
        """Whether any port is up; unknown where no port's state is known."""
        states = [port.up for port in self.ports or () if port.up is not None]
        return any(states) if states else None

    @property
    def usable(self) -> bool | None:
        """Whether ranks can send over its RDMA device: a port is up, and it is neither software nor a virtual
        function of an Ethernet adapter. Unknown where the state of its ports is."""
        # Slingshot has a driver class of its own, not the kernel's RDMA devices.
        if self.kind in ("software", "iwarp", "usnic") or (self.rdma is False and self.kind != "slingshot"):
            return False
        if self.virtual and self.kind in ("ethernet", "roce"):
            return False
        return self.up


@dataclass(frozen=True)
class Link:
    """How two devices reach each other; both directions."""

    a: str
    """Key of a GPU or name of a NIC."""

    b: str
    level: str | None = None
    """PCIe level, one of `LEVELS`; unknown where only a faster link was shown."""

    kind: str | None = None
    """`nvlink`, `xgmi`, or `xelink` where there is one besides PCIe."""

    lanes: int | None = None
    """Number of such links bonded together (the n of NVn)."""

    hops: int | None = None
    weight: int | None = None
    """rocm-smi's weight: smaller is nearer."""

    said: str | None = None
    """The source's own word, such as `SOC` of old drivers for SYS."""

    @property
    def word(self) -> str | None:
        """As its source, or else nvidia-smi, writes it: `NV12`, `XGMI`, `PIX`."""
        if self.said is not None:
            return self.said
        if self.kind == "nvlink":
            return f"NV{self.lanes or ''}"
        return self.kind.upper() if self.kind else self.level


@dataclass(frozen=True)
class Counts:
    """Numbers that a source tells without saying which is which."""

    cpus: int | None = None
    packages: int | None = None
    cores_per_package: int | None = None
    threads_per_core: int | None = None
    numa_nodes: int | None = None
    gpus: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Source:
    """One text or tree that the topology was read from."""

    kind: str
    """`sysfs`, `hwloc`, `nvidia-smi topo`, … (see `dthpc.placement.read.recognise`)."""

    where: str
    """File or command."""

    told: tuple[str, ...] = ()
    """Which of the topology's facts it told."""


@dataclass(frozen=True)
class Conflict:
    """Two sources that say different things of one fact."""

    what: str
    kept: str
    kept_from: str
    other: str
    other_from: str

    def __str__(self) -> str:
        return f"{self.what}: {self.kept_from} says {self.kept} (kept), {self.other_from} says {self.other}"


@dataclass(frozen=True)
class Topology:
    """Everything known of one node."""

    host: str | None = None
    existing: CpuSet | None = None
    """CPUs that are online."""

    offline: CpuSet | None = None
    """CPUs that the machine has but that are switched off."""

    allowed: CpuSet | None = None
    """CPUs that this process (or the cgroup of the recording) may use."""

    allowed_memory: frozenset[int] | None = None
    """Memory nodes that may be used."""

    packages: tuple[Package, ...] | None = None
    numa: tuple[NumaNode, ...] | None = None
    caches: tuple[Cache, ...] | None = None
    cores: tuple[Core, ...] | None = None
    gpus: tuple[Gpu, ...] | None = None
    nics: tuple[Nic, ...] | None = None
    links: tuple[Link, ...] | None = None
    switches: tuple[str, ...] | None = None
    """Bus ids of PCIe bridges and switches, as in the devices' `pcie`."""

    counts: Counts = Counts()
    complete: bool = True
    """False where the text was cut and what is missing cannot be told."""

    sources: tuple[Source, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    notes: tuple[str, ...] = ()
    """What was unclear or odd, one sentence each, for people."""

    _by_pair: dict[frozenset[str], Link] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_pair.update({frozenset((link.a, link.b)): link for link in self.links or ()})

    def gpu(self, key: str | int) -> Gpu:
        """The GPU of a key or of an index; KeyError where there is none."""
        for gpu in self.gpus or ():
            if key in (gpu.key, gpu.index):
                return gpu
        raise KeyError(key)

    def nic(self, name: str) -> Nic:
        """The NIC of a name; KeyError where there is none."""
        for nic in self.nics or ():
            if name == nic.name:
                return nic
        raise KeyError(name)

    def numa_node(self, index: int) -> NumaNode | None:
        return next((node for node in self.numa or () if node.index == index), None)

    def numa_of_cpu(self, cpu: int) -> int | None:
        """The memory node of a CPU: the first that lists it."""
        return next((node.index for node in self.numa or () if cpu in (node.cpus or ())), None)

    def siblings(self, cpu: int) -> CpuSet | None:
        """The hardware threads of the CPU's core, itself among them; unknown where the cores are."""
        return next((core.cpus for core in self.cores or () if cpu in core.cpus), None)

    def usable_cpus(self) -> CpuSet | None:
        """CPUs that exist and are allowed, as far as either is known."""
        known = [cpus for cpus in (self.existing, self.allowed) if cpus is not None]
        return frozenset.intersection(*known) if known else None

    def link(self, a: str, b: str) -> Link | None:
        """What a source said of the pair, in either order."""
        return self._by_pair.get(frozenset((a, b)))

    def level(self, a: Gpu | Nic, b: Gpu | Nic) -> str | None:
        """How near two devices are by PCIe, one of `LEVELS`: as a source told it, else from the PCIe tree, else from
        their memory nodes (which tell NODE from SYS alone); unknown where nothing of that is."""
        link = self.link(_name(a), _name(b))
        if link is not None and link.level is not None:
            return link.level
        return pcie_level(a.pcie, b.pcie, _same_numa(a, b))

    def nearest_nics(self, gpu: Gpu, among: Sequence[Nic] | None = None) -> tuple[str | None, list[Nic]]:
        """The NICs nearest to a GPU and their level. SYS means that none is near: the list is empty then.

        Args:
            gpu: one of this topology.
            among: the NICs to choose from; all of the topology if `None`.
        """
        by_level: dict[str, list[Nic]] = {}
        for nic in self.nics or () if among is None else among:
            level = self.level(gpu, nic)
            if level is not None:
                by_level.setdefault(level, []).append(nic)
        best = next((level for level in LEVELS if level in by_level), None)
        return best, by_level[best] if best not in (None, "SYS") else []

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and texts; CPU sets as text (`0-3,8`); unknown facts are left out."""
        made: dict[str, Any] = _plain(self)
        return made


def pcie_level(a: Sequence[str] | None, b: Sequence[str] | None, same_numa: bool | None) -> str | None:
    """The level of two devices from the bridges above each (root first), else from their memory nodes.

    A PCIe switch is an upstream port with a downstream port for each device, so that two devices of one switch have at
    most one bridge each below what they share.
    """
    if a and b and a[0] == b[0]:
        shared = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if shared == 1:
            return "PHB"
        return "PIX" if max(len(a), len(b)) - shared <= 1 else "PXB"
    return None if same_numa is None else "NODE" if same_numa else "SYS"


def bus_id(text: str) -> str | None:
    """A PCI address in its full form, lower case: `00000000:3B:00.0` and `3b:00.0` are `0000:3b:00.0`."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", text.strip().lower())
    if match is None:
        return None
    domain, bus, device = (int(part or "0", 16) for part in match.groups()[:3])
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4] or '0'}"


def _name(device: Gpu | Nic) -> str:
    return device.key if isinstance(device, Gpu) else device.name


def _same_numa(a: Gpu | Nic, b: Gpu | Nic) -> bool | None:
    if not a.numa or not b.numa:
        return None
    return bool(set(a.numa) & set(b.numa))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(item) for name, item in _known(value)}
    if isinstance(value, frozenset):
        return format_cpus(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _known(value: Any) -> Iterator[tuple[str, Any]]:
    for entry in fields(value):
        item = getattr(value, entry.name)
        if item is not None and not entry.name.startswith("_"):
            yield entry.name, item
