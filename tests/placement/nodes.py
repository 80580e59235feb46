"""Small topologies in the likeness of documented machines: what decides a placement, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dthpc.placement.cpuset import CpuSet
from dthpc.placement.topology import Cache, Core, Gpu, GpuPart, Link, Nic, NumaNode, Port, Topology

GIB = 1 << 30


def node(
    cores: int,
    numa: int,
    *,
    threads: int = 2,
    l3: int | None = None,
    gpus: Sequence[Gpu] = (),
    nics: Sequence[Nic] = (),
    links: Sequence[Link] = (),
) -> Topology:
    """A node whose second threads are numbered after the first of all cores, as on x86.

    Args:
        cores: cores of the node.
        numa: memory nodes, of equal size.
        threads: hardware threads of a core.
        l3: cores of an L3 domain; those of a memory node if `None`.
        gpus: GPUs.
        nics: NICs.
        links: links between devices.
    """
    seats = [frozenset(core + thread * cores for thread in range(threads)) for core in range(cores)]
    size, domain = cores // numa, l3 or cores // numa
    every: CpuSet = frozenset(range(cores * threads))
    return Topology(
        existing=every,
        allowed=every,
        numa=tuple(
            NumaNode(index, frozenset().union(*seats[index * size : (index + 1) * size]), 64 * GIB)
            for index in range(numa)
        ),
        caches=tuple(Cache(frozenset().union(*seats[i : i + domain])) for i in range(0, cores, domain)),
        cores=tuple(Core(cpus) for cpus in seats),
        gpus=tuple(gpus),
        nics=tuple(nics),
        links=tuple(links),
    )


def gpu(index: int, numa: int, vendor: str = "nvidia", module: int | None = None) -> Gpu:
    """One GPU by its number and memory node."""
    bus = f"0000:{16 + 8 * index:02x}:00.0"
    return Gpu(f"GPU{index}", index, bus, f"GPU-{index:08d}", vendor, numa=(numa,), module=module)


def hca(name: str, numa: int | None = None, rate: float = 200.0, state: str = "active") -> Nic:
    """One InfiniBand adapter."""
    port = Port(1, state, rate_gbps=rate, link_layer="infiniband")
    return Nic(name, "infiniband", ports=(port,), numa=None if numa is None else (numa,), rdma=True)


def hsn(index: int, numa: int) -> Nic:
    """One Slingshot adapter."""
    port = Port(1, "up", rate_gbps=200.0)
    return Nic(f"hsn{index}", "slingshot", interfaces=(f"hsn{index}",), ports=(port,), numa=(numa,))


def near(level: str, pairs: Mapping[int, Sequence[str]], gpus: int, nics: Sequence[str]) -> list[Link]:
    """Links as nvidia-smi tells them: each GPU has its NICs at one level and all others at SYS."""
    return [
        Link(f"GPU{index}", name, level if name in pairs.get(index, ()) else "SYS")
        for index in range(gpus)
        for name in nics
    ]


def nvlinks(gpus: int, lanes: int) -> list[Link]:
    """Every GPU joined to every other."""
    return [Link(f"GPU{a}", f"GPU{b}", "SYS", "nvlink", lanes) for a in range(gpus) for b in range(a)]


def dgx_a100() -> Topology:
    numa = {0: 3, 1: 3, 2: 1, 3: 1, 4: 7, 5: 7, 6: 5, 7: 5}
    names = [f"mlx5_{i}" for i in range(12)]
    compute = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 4: (6, 7), 5: (6, 7), 6: (8, 9), 7: (8, 9)}
    pairs = {index: [f"mlx5_{i}" for i in found] for index, found in compute.items()}
    links = near("PXB", pairs, 8, names) + nvlinks(8, 12)
    return node(128, 8, l3=4, gpus=[gpu(i, n) for i, n in numa.items()], nics=list(map(hca, names)), links=links)


def dgx_h100() -> Topology:
    names = [f"mlx5_{i}" for i in range(12)]
    pairs = {index: [name] for index, name in enumerate(f"mlx5_{i}" for i in (0, 3, 4, 5, 6, 9, 10, 11))}
    links = near("PXB", pairs, 8, names) + nvlinks(8, 18)
    return node(112, 2, gpus=[gpu(i, i // 4) for i in range(8)], nics=list(map(hca, names)), links=links)


def mi250x() -> Topology:
    """Frontier and LUMI-G: eight dies of four cards, each next to another L3 domain."""
    numa = {0: 3, 1: 3, 2: 1, 3: 1, 4: 0, 5: 0, 6: 2, 7: 2}
    gpus = [gpu(index, near_to, "amd", index // 2) for index, near_to in numa.items()]
    return node(64, 4, l3=8, gpus=gpus, nics=[hsn(index, near_to) for index, near_to in enumerate((3, 1, 0, 2))])


def perlmutter() -> Topology:
    return node(
        64,
        4,
        l3=8,
        gpus=[gpu(i, 3 - i) for i in range(4)],
        nics=[hsn(i, 3 - i) for i in range(4)],
        links=nvlinks(4, 4),
    )


def polaris() -> Topology:
    return node(
        32,
        4,
        l3=8,
        gpus=[gpu(i, 3 - i) for i in range(4)],
        nics=[hca("mlx5_0", 0), hca("mlx5_1", 2)],
        links=nvlinks(4, 4),
    )


def juwels_booster() -> Topology:
    numa = (3, 1, 7, 5)
    nics = [hca(f"mlx5_{i}", n) for i, n in enumerate(numa)]
    return node(48, 8, l3=3, gpus=[gpu(i, n) for i, n in enumerate(numa)], nics=nics, links=nvlinks(4, 4))


def marenostrum5() -> Topology:
    nics = [hca(f"mlx5_{i}", i // 2) for i in range(4)]
    pairs = {i: [f"mlx5_{i}"] for i in range(4)}
    links = near("PIX", pairs, 4, list(pairs[0] + pairs[1] + pairs[2] + pairs[3])) + nvlinks(4, 6)
    return node(80, 2, threads=1, gpus=[gpu(i, i // 2) for i in range(4)], nics=nics, links=links)


def gh200() -> Topology:
    """Alps: four superchips; the GPUs' own memory shows as memory nodes without CPUs."""
    memory = [NumaNode(4 + 8 * i, frozenset(), 96 * GIB) for i in range(4)]
    gpus = [replace(gpu(i, i), memory_numa=4 + 8 * i) for i in range(4)]
    made = node(288, 4, threads=1, gpus=gpus, nics=[hsn(i, i) for i in range(4)], links=nvlinks(4, 6))
    return replace(made, numa=(*(made.numa or ()), *memory))


def aurora() -> Topology:
    tiles = (GpuPart("tile", 0), GpuPart("tile", 1))
    gpus = [replace(gpu(i, i // 3, "intel"), parts=tiles) for i in range(6)]
    return node(104, 2, gpus=gpus, nics=[hsn(i, i // 4) for i in range(8)])


def summit() -> Topology:
    """Threads of a core are numbered in a row, and numbers of memory nodes leave gaps."""
    made = node(176, 1, threads=1)
    cores = tuple(Core(frozenset(range(4 * core, 4 * core + 4))) for core in range(44))
    sockets = [NumaNode(8 * i, frozenset(range(88 * i, 88 * (i + 1))), 256 * GIB) for i in range(2)]
    memory = [NumaNode(250 + i, frozenset(), 16 * GIB) for i in range(6)]
    gpus = tuple(replace(gpu(i, 8 * (i // 3)), memory_numa=255 - i) for i in range(6))
    return replace(made, cores=cores, caches=None, numa=(*sockets, *memory), gpus=gpus)
