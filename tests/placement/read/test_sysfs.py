"""A made-up node with two packages, SMT, a GPU of its own memory node, and two adapters, one below the same switch."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.recognise import read_path
from dthpc.placement.read.sysfs import read_sysfs
from dthpc.placement.read.tree import DirectoryTree, open_tree
from dthpc.placement.topology import Topology

ROOT = "sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def node(root: Path) -> Path:
    """CPUs 0-7 online and 8 off, two a core; memory nodes 0, 8 and 255 (of a GPU)."""
    files = {"sys/devices/system/cpu/online": "0-7", "proc/self/cgroup": "3:cpuset:/job\n0::/"}
    for cpu in range(8):
        package, pair = cpu % 4 // 2, f"{cpu % 4},{cpu % 4 + 4}"
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files |= {
            f"{base}/topology/{name}": text
            for name, text in [("core_id", str(cpu % 2)), ("thread_siblings_list", pair)]
        }
        files |= {f"{base}/topology/physical_package_id": str(package), f"{base}/cache/index0/level": "1"}
        shared = "0-1,4-5" if package == 0 else "2-3,6-7"
        files |= {
            f"{base}/cache/index3/{name}": text
            for name, text in [("level", "3"), ("shared_cpu_list", shared), ("size", "32768K")]
        }
    files["sys/devices/system/cpu/cpu8/online"] = "0"
    for number, cpus, size in [(0, "0-1,4-5", 1024), (8, "2-3,6-7", 2048), (255, "", 512)]:
        base = f"sys/devices/system/node/node{number}"
        files |= {
            f"{base}/cpulist": cpus,
            f"{base}/meminfo": f"Node {number} MemTotal:  {size} kB",
            f"{base}/distance": "10 40 80",
        }
    files["sys/fs/cgroup/cpuset/job/cpuset.cpus"] = "0-3"
    files["sys/fs/cgroup/cpuset/job/cpuset.mems"] = "0,8"
    for place, kind, vendor, device in [
        (f"{ROOT}/0000:42:00.0/0000:43:00.0", "0x030200", "0x10de", "0x2330"),
        (f"{ROOT}/0000:42:01.0/0000:44:00.0", "0x020700", "0x15b3", "0x1021"),
        ("sys/devices/pci0000:00/0000:00:02.0", "0x020000", "0x8086", "0x1521"),
        ("sys/devices/pci0000:00/0000:00:03.0", "0x030000", "0x1a03", "0x2000"),
    ]:
        files |= {
            f"{place}/class": kind,
            f"{place}/vendor": vendor,
            f"{place}/device": device,
            f"{place}/numa_node": "8",
        }
        files |= {f"{place}/local_cpulist": "2-3,6-7"}
    ib = f"{ROOT}/0000:42:01.0/0000:44:00.0/infiniband/mlx5_0/ports/1"
    files |= {
        f"{ib}/state": "4: ACTIVE",
        f"{ib}/phys_state": "5: LinkUp",
        f"{ib}/rate": "400 Gb/sec (4X NDR)",
        f"{ib}/link_layer": "InfiniBand",
    }
    files |= {f"{ROOT}/0000:42:01.0/0000:44:00.0/net/ib0/operstate": "down"}
    files |= {
        "sys/devices/pci0000:00/0000:00:02.0/net/eth0/operstate": "up",
        "sys/devices/pci0000:00/0000:00:02.0/net/eth0/speed": "25000",
    }
    files["proc/driver/nvidia/gpus/0000:43:00.0/numa_status"] = "Node:      255\nStatus:    online"
    write(root, files)
    for link, target in [
        ("sys/bus/pci/devices/0000:43:00.0", f"../../../../{ROOT}/0000:42:00.0/0000:43:00.0"),
        ("sys/bus/pci/devices/0000:44:00.0", f"../../../../{ROOT}/0000:42:01.0/0000:44:00.0"),
        ("sys/bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0"),
        ("sys/bus/pci/devices/0000:00:03.0", "../../../devices/pci0000:00/0000:00:03.0"),
        ("sys/class/infiniband/mlx5_0", f"../../../{ROOT}/0000:42:01.0/0000:44:00.0/infiniband/mlx5_0"),
        ("sys/class/net/ib0", f"../../../{ROOT}/0000:42:01.0/0000:44:00.0/net/ib0"),
        ("sys/class/net/eth0", "../../devices/pci0000:00/0000:00:02.0/net/eth0"),
    ]:
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(target)
    return root


@pytest.fixture(params=["directory", "archive"])
def topology(request: pytest.FixtureRequest, tmp_path: Path) -> Topology:
    root = node(tmp_path / "recorded" / "root")
    if request.param == "directory":
        return read_sysfs(open_tree(tmp_path / "recorded"))
    with tarfile.open(tmp_path / "node.tar.bz2", "w:bz2") as archive:
        archive.add(root, "node/root")
    return read_path(tmp_path / "node.tar.bz2")


def test_cpus_cores_and_caches(topology: Topology) -> None:
    assert topology.existing == frozenset(range(8))
    assert topology.offline == {8}
    assert topology.allowed == frozenset(range(4))
    assert topology.allowed_memory == {0, 8}
    assert [(core.cpus, core.package) for core in topology.cores or ()][:3] == [({0, 4}, 0), ({1, 5}, 0), ({2, 6}, 1)]
    assert {(cache.cpus, cache.size_bytes) for cache in topology.caches or ()} >= {(frozenset({0, 1, 4, 5}), 2**25)}
    assert [package.cpus for package in topology.packages or ()] == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_memory_nodes_with_gaps_and_one_without_cpus(topology: Topology) -> None:
    assert [(n.index, n.has_cpus, n.memory_bytes, n.package) for n in topology.numa or ()] == [
        (0, True, 2**20, 0),
        (8, True, 2**21, 1),
        (255, False, 2**19, None),
    ]
    node = topology.numa_node(8)
    assert node is not None
    assert node.distances == {0: 10, 8: 40, 255: 80}


def test_gpus_without_the_display_of_the_management_controller(topology: Topology) -> None:
    [gpu] = topology.gpus or ()
    assert (gpu.bus_id, gpu.vendor, gpu.numa, gpu.memory_numa) == ("0000:43:00.0", "nvidia", (8,), 255)
    assert gpu.index is None


def test_adapters_with_their_ports_and_their_way_to_the_gpu(topology: Topology) -> None:
    ethernet, infiniband = topology.nics or ()
    assert (infiniband.name, infiniband.kind, infiniband.interfaces) == ("mlx5_0", "infiniband", ("ib0",))
    assert [(p.state, p.physical, p.rate_gbps) for p in infiniband.ports or ()] == [("active", "linkup", 400.0)]
    assert infiniband.usable
    assert (ethernet.name, ethernet.kind, ethernet.up, ethernet.usable) == ("eth0", "ethernet", True, False)
    [gpu] = topology.gpus or ()
    assert topology.nearest_nics(gpu) == ("PIX", [infiniband])
    assert topology.level(gpu, ethernet) == "NODE"


def test_a_cgroup_of_version_2_is_looked_for_upwards(tmp_path: Path) -> None:
    root = node(tmp_path)
    write(
        root, {"proc/self/cgroup": "0::/slurm/job_1/step_0", "sys/fs/cgroup/slurm/job_1/cpuset.cpus.effective": "2-5"}
    )
    assert read_sysfs(DirectoryTree(root)).allowed == frozenset({2, 3, 4, 5})


def test_no_recording_of_sysfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no sys/devices/system"):
        open_tree(tmp_path)
    (tmp_path / "sys/devices/system").mkdir(parents=True)
    with pytest.raises(UserError, match="no CPU"):
        read_sysfs(open_tree(tmp_path))
    (tmp_path / "cut.tar").write_bytes(b"\x1f\x8b nonsense")
    with pytest.raises(UserError, match="cannot be read"):
        open_tree(tmp_path / "cut.tar")
