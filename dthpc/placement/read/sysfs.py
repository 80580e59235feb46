"""The kernel's own account of a node: `/sys`, with the CPU sets of `/proc`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dthpc.placement.cpuset import CpuSet, parse_cpus, parse_mask
from dthpc.placement.read.sysfs_devices import read_gpus, read_nics, switches_of
from dthpc.placement.read.text import refuse
from dthpc.placement.read.tree import Tree
from dthpc.placement.topology import Cache, Core, NumaNode, Package, Source, Topology

KIND = "sysfs"

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"


def read_sysfs(tree: Tree) -> Topology:
    """Everything that the tree tells.

    Raises:
        UserError: the tree has no CPUs.
    """
    existing, offline = _online(tree)
    if not existing:
        raise refuse(
            tree.where, f"no CPU is found in {_CPU}", "", "record the node again, with its /sys/devices/system"
        )
    allowed, memory = allowed_by_cgroup(tree)
    cores = tuple(_cores(tree, existing))
    packages: dict[int, set[int]] = {}
    for core in cores:
        if core.package is not None:
            packages.setdefault(core.package, set()).update(core.cpus)
    numa = tuple(_nodes(tree, existing, cores))
    gpus, nics = tuple(read_gpus(tree, numa)), tuple(read_nics(tree))
    notes = [] if numa or not tree.names(_CPU) else ["the kernel shows no memory nodes"]
    return Topology(
        existing=existing,
        offline=offline,
        allowed=None if allowed is None else allowed & existing,
        allowed_memory=memory,
        packages=tuple(Package(index, frozenset(cpus)) for index, cpus in sorted(packages.items())) or None,
        numa=numa or None,
        caches=_caches(tree, existing),
        cores=cores or None,
        gpus=gpus,
        nics=nics,
        switches=switches_of([*gpus, *nics]),
        sources=(Source(KIND, tree.where, ("cpus", "packages", "numa", "caches", "cores", "gpus", "nics")),),
        notes=tuple(notes),
    )


def allowed_by_cgroup(tree: Tree) -> tuple[CpuSet | None, frozenset[int] | None]:
    """The CPUs and memory nodes of the cgroup of the process that read or recorded the tree."""
    for base, cpus, mems in _cgroups(tree):
        text = tree.read(f"{base}/{cpus}")
        if text:
            nodes = tree.read(f"{base}/{mems}")
            return parse_cpus(text, f"{tree.where}: {cpus}"), parse_cpus(nodes, mems) if nodes else None
    return None, None


def _cgroups(tree: Tree) -> Iterator[tuple[str, str, str]]:
    """Where the CPU set may stand: of version 1 and 2, the nearest directory first."""
    lines = [line.split(":", 2) for line in (tree.read("proc/self/cgroup") or "").splitlines()]
    old = next((parts[2] for parts in lines if len(parts) == 3 and "cpuset" in parts[1].split(",")), None)
    new = next((parts[2] for parts in lines if len(parts) == 3 and parts[:2] == ["0", ""]), None)
    old = old or tree.read("proc/self/cpuset")
    for path in _upwards(old):
        for names in (("cpuset.effective_cpus", "cpuset.effective_mems"), ("cpuset.cpus", "cpuset.mems")):
            yield f"sys/fs/cgroup/cpuset{path}", *names
        yield f"dev/cpuset{path}", "cpus", "mems"
    for path in _upwards(new):
        yield f"sys/fs/cgroup{path}", "cpuset.cpus.effective", "cpuset.mems.effective"


def _upwards(path: str | None) -> Iterator[str]:
    """The path and those above it, without a slash at the end; within a container only an upper one may show."""
    while path:
        path = path.rstrip("/")
        yield path
        path = path.rpartition("/")[0] if path else None
        if path == "":
            yield ""
            return


def _online(tree: Tree) -> tuple[CpuSet, CpuSet | None]:
    text = tree.read(f"{_CPU}/online")
    numbers = frozenset(int(name[3:]) for name in tree.names(_CPU) if re.fullmatch(r"cpu\d+", name))
    if text:
        online = parse_cpus(text, f"{tree.where}: {_CPU}/online")
        # A recording may have left CPUs out, and a container may show more than there are.
        existing = online & numbers if numbers else online
    else:
        existing = frozenset(cpu for cpu in numbers if tree.read(f"{_CPU}/cpu{cpu}/online") in (None, "1"))
    return existing, numbers - existing if numbers else None


def _cores(tree: Tree, existing: CpuSet) -> Iterator[Core]:
    seen: set[int] = set()
    capacities = {cpu: tree.read(f"{_CPU}/cpu{cpu}/cpu_capacity") for cpu in sorted(existing)[:1]}
    mixed = any(capacities.values())
    made: list[tuple[Core, int]] = []
    for cpu in sorted(existing):
        if cpu in seen:
            continue
        base = f"{_CPU}/cpu{cpu}/topology"
        siblings = _set(tree, base, ("core_cpus_list", "thread_siblings_list"), ("core_cpus", "thread_siblings"))
        if siblings is None:
            continue
        siblings = siblings & existing | {cpu}
        seen |= siblings
        capacity = int(tree.read(f"{_CPU}/cpu{cpu}/cpu_capacity") or 0) if mixed else 0
        core = Core(siblings, _number(tree.read(f"{base}/core_id")), _number(tree.read(f"{base}/physical_package_id")))
        made.append((core, capacity))
    # Firmware rates cores of one kind a little differently, so that only a clear gap tells two kinds apart.
    fastest = max((capacity for _, capacity in made), default=0)
    slow = {id(core) for core, capacity in made if capacity < 0.8 * fastest}
    for core, _ in made:
        yield Core(core.cpus, core.index, core.package, id(core) in slow) if slow else core


def _caches(tree: Tree, existing: CpuSet) -> tuple[Cache, ...] | None:
    """The caches of the last level; each CPU is asked only if no cache found so far holds it."""
    seen: set[int] = set()
    caches = []
    for cpu in sorted(existing):
        if cpu in seen:
            continue
        base = f"{_CPU}/cpu{cpu}/cache"
        last = max(
            ((_number(tree.read(f"{base}/{name}/level")) or 0, name) for name in _indexes(tree, base)), default=(0, "")
        )
        shared = _set(tree, f"{base}/{last[1]}", ("shared_cpu_list",), ("shared_cpu_map",)) if last[0] > 1 else None
        if shared is None:
            continue
        seen |= shared
        caches.append(Cache(shared & existing, _bytes(tree.read(f"{base}/{last[1]}/size"))))
    return tuple(caches) if caches or tree.names(f"{_CPU}/cpu{min(existing)}/cache") else None


def _indexes(tree: Tree, base: str) -> list[str]:
    """The deepest of a CPU's caches: their numbers rise with their levels."""
    names = [name for name in tree.names(base) if re.fullmatch(r"index\d+", name)]
    return sorted(names, key=lambda name: int(name[5:]))[-1:]


def _nodes(tree: Tree, existing: CpuSet, cores: tuple[Core, ...]) -> Iterator[NumaNode]:
    numbers = sorted(int(name[4:]) for name in tree.names(_NODE) if re.fullmatch(r"node\d+", name))
    packages = {cpu: core.package for core in cores for cpu in core.cpus}
    for number in numbers:
        base = f"{_NODE}/node{number}"
        cpus = _set(tree, base, ("cpulist",), ("cpumap",))
        if cpus is None:
            cpus = frozenset(int(name[3:]) for name in tree.names(base) if re.fullmatch(r"cpu\d+", name))
        cpus &= existing
        total = re.search(r"MemTotal:\s*(\d+) kB", tree.read(f"{base}/meminfo") or "")
        row = [int(word) for word in (tree.read(f"{base}/distance") or "").split()]
        yield NumaNode(
            number,
            cpus,
            int(total[1]) * 1024 if total else None,
            packages.get(min(cpus)) if cpus else None,
            dict(zip(numbers, row, strict=True)) if len(row) == len(numbers) else None,
        )


def _set(tree: Tree, base: str, lists: tuple[str, ...], masks: tuple[str, ...]) -> CpuSet | None:
    for name in lists:
        text = tree.read(f"{base}/{name}")
        if text is not None:
            return parse_cpus(text, f"{tree.where}: {base}/{name}")
    for name in masks:
        text = tree.read(f"{base}/{name}")
        if text:
            return parse_mask(text, f"{tree.where}: {base}/{name}")
    return None


def _number(text: str | None) -> int | None:
    """A number of the kernel, which writes -1 where it knows none."""
    return int(text) if text and text.isdigit() else None


def _bytes(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)([KM]?)", text or "")
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024**2}[match[2]] if match else None
