from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.hwloc import read_hwloc

OLD = """<?xml version="1.0"?>
<!DOCTYPE topology SYSTEM "hwloc.dtd">
<topology>
 <object type="Machine" os_index="0" cpuset="0x0000000f" online_cpuset="0x00000007" allowed_cpuset="0x00000003">
  <distances nbobjs="2" relative_depth="1" latency_base="10.0">
   <latency value="1.0"/><latency value="4.0"/><latency value="4.0"/><latency value="1.0"/>
  </distances>
  <object type="NUMANode" os_index="0" cpuset="0x0000000f" local_memory="1024">
   <object type="Socket" os_index="0" cpuset="0x0000000f">
    <object type="Cache" cpuset="0x0000000f" cache_size="2048" depth="3">
     <object type="Core" os_index="5" cpuset="0x00000003">
      <object type="PU" os_index="0" cpuset="0x00000001"/><object type="PU" os_index="1" cpuset="0x00000002"/>
     </object>
     <object type="Core" os_index="6" cpuset="0x0000000c">
      <object type="PU" os_index="2" cpuset="0x00000004"/><object type="PU" os_index="3" cpuset="0x00000008"/>
     </object>
    </object>
   </object>
   <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-05]">
    <object type="Bridge" bridge_type="1-1" bridge_pci="0000:[01-01]" pci_busid="0000:00:01.0">
     <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:15f9] [10de:116b] a1">
      <object type="OSDev" name="card1" osdev_type="1"/>
     </object>
    </object>
    <object type="Bridge" bridge_type="1-1" bridge_pci="0000:[02-02]" pci_busid="0000:00:02.0">
     <object type="PCIDev" pci_busid="0000:02:00.0" pci_type="0207 [15b3:1013] [15b3:0013] 00">
      <object type="OSDev" name="ib0" osdev_type="2"/>
      <object type="OSDev" name="mlx5_0" osdev_type="3"><info name="Port1State" value="4"/></object>
     </object>
    </object>
    <object type="PCIDev" pci_busid="0000:03:00.0" pci_type="0300 [102b:0534] [102b:0534] 00">
     <object type="OSDev" name="card0" osdev_type="1"/>
    </object>
   </object>
  </object>
  <object type="NUMANode" os_index="252" cpuset="0x0" local_memory="512"/>
 </object>
</topology>
"""

NEW = """<topology version="{version}">
 <object type="Machine" cpuset="0x0000000f" allowed_cpuset="0x0000000f" allowed_nodeset="0x00000003" gp_index="1">
  <info name="HostName" value="n1"/>
  <object type="Package" os_index="0" cpuset="0x0000000f" gp_index="2">
   <object type="NUMANode" os_index="0" cpuset="0x0000000f" local_memory="1024" gp_index="3"/>
   <object type="NUMANode" os_index="1" cpuset="0x0000000f" local_memory="2048" gp_index="4"/>
   <object type="L2Cache" cpuset="0x00000003" cache_size="10" gp_index="5">
    <object type="Core" os_index="0" cpuset="0x00000003">
     <object type="PU" os_index="0" cpuset="0x00000001"/><object type="PU" os_index="1" cpuset="0x00000002"/>
    </object>
   </object>
   <object type="Core" os_index="1" cpuset="0x0000000c">
    <object type="PU" os_index="2" cpuset="0x00000004"/><object type="PU" os_index="3" cpuset="0x00000008"/>
   </object>
   <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-ff]" gp_index="9">
    <object type="PCIDev" pci_busid="0000:41:00.0" pci_type="0302 [10de:2330] [10de:0000] a1" gp_index="10">
     <object type="OSDev" name="nvml1" osdev_type="{gpu}" gp_index="11"><info name="NVIDIAUUID" value="GPU-b"/></object>
    </object>
    <object type="PCIDev" pci_busid="0000:42:00.0" pci_type="0302 [10de:2330] [10de:0000] a1" gp_index="12">
     <object type="OSDev" name="nvml0" osdev_type="{gpu}" gp_index="13"/>
    </object>
    <object type="PCIDev" pci_busid="0000:43:00.0" pci_type="0680 [10de:22a3] [10de:0000] a1" gp_index="14"/>
    <object type="PCIDev" pci_busid="0000:44:00.0" pci_type="0200 [1d0f:efa2] [1d0f:efa2] 00" gp_index="15">
     <object type="OSDev" name="rdmap68s0" osdev_type="{rdma}" gp_index="16"/>
    </object>
   </object>
  </object>
 </object>
 <distances2 type="NUMANode" nbobjs="2" name="NUMALatency" indexing="os">
  <indexes length="4">0 1 </indexes><u64values length="9">10 21 </u64values><u64values length="9">21 10 </u64values>
 </distances2>
 <distances2hetero nbobjs="3" name="NVLinkBandwidth">
  <indexes length="30">OSDev:11 OSDev:13 PCIDev:14 </indexes>
  <u64values length="30">0 0 450000 0 0 450000 450000 450000 0 </u64values>
 </distances2hetero>
 <cpukind cpuset="0x00000003" forced_efficiency="0"><info name="CoreType" value="IntelAtom"/></cpukind>
 <cpukind cpuset="0x0000000c" forced_efficiency="1"><info name="CoreType" value="IntelCore"/></cpukind>
</topology>
"""


def test_version_1() -> None:
    node = read_hwloc(OLD)
    assert node.existing == {0, 1, 2}
    assert node.allowed == {0, 1}
    assert [(core.index, core.cpus) for core in node.cores or ()] == [(5, {0, 1}), (6, {2, 3})]
    assert [(n.index, n.cpus, n.memory_bytes) for n in node.numa or ()] == [(0, {0, 1, 2, 3}, 1024), (252, set(), 512)]
    assert node.numa is not None
    assert node.numa[0].distances == {0: 10, 252: 40}
    assert [cache.size_bytes for cache in node.caches or ()] == [2048]
    [gpu], [nic] = node.gpus or (), node.nics or ()
    assert (gpu.bus_id, gpu.numa, gpu.index, gpu.compute) == ("0000:01:00.0", (0,), None, None)
    assert (nic.name, nic.kind, nic.interfaces, nic.up) == ("mlx5_0", "infiniband", ("ib0",), True)
    assert node.level(gpu, nic) == "PHB"


@pytest.mark.parametrize(("version", "gpu", "rdma"), [("2.0", 1, 3), ("3.0", 12, 48)])
def test_versions_2_and_3_number_devices_differently_and_say_the_same(version: str, gpu: int, rdma: int) -> None:
    node = read_hwloc(NEW.format(version=version, gpu=gpu, rdma=rdma))
    assert node.host == "n1"
    assert [(g.key, g.bus_id, g.uuid) for g in node.gpus or ()] == [
        ("GPU1", "0000:41:00.0", "GPU-b"),
        ("GPU0", "0000:42:00.0", None),
    ]
    link = node.link("GPU0", "GPU1")
    assert link is not None
    assert link.kind == "nvlink"
    assert [(nic.name, nic.kind, nic.rdma) for nic in node.nics or ()] == [("rdmap68s0", "efa", True)]
    assert [core.efficient for core in node.cores or ()] == [True, False]
    assert node.gpu(0).numa == (0, 1)
    assert [(n.index, n.distances) for n in node.numa or ()] == [(0, {0: 10, 1: 21}), (1, {0: 21, 1: 10})]


@pytest.mark.parametrize(
    ("text", "why"), [(OLD[:900], "cut or damaged"), ("<topology/>", "not hwloc's"), ("<system/>", "not hwloc's")]
)
def test_what_is_no_whole_file_of_hwloc_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_hwloc(text, "node.xml")
