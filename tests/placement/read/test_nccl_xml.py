from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.nccl_xml import read_nccl_xml

BARE = """<system version="1">
 <cpu numaid="3" affinity="0000000f,00000000" arch="x86_64">
  <pci busid="ffff:ff:01.0" class="0x060400">
   <pci busid="0003:00:00.0" class="0x030200"/>
   <pci busid="0103:00:00.0" class="0x020700"/>
  </pci>
 </cpu>
</system>"""

DUMPED = """<system version="1">
 <cpu numaid="0" affinity="0000ffff">
  <pci busid="0000:05:00.0" class="0x060400" vendor="0x15b3">
   <pci busid="0000:06:00.0" class="0x060400" vendor="0x1022">
    <pci busid="0000:0c:00.0" class="0x120000" vendor="0x1002">
     <gpu dev="0" gcn="942" rank="0"><xgmi target="0000:15:00.0" count="1" tclass="0x120000"/></gpu>
    </pci>
   </pci>
   <pci busid="0000:07:00.0" class="0x020700" vendor="0x15b3">
    <nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0xf01c"/></nic>
   </pci>
  </pci>
  <pci busid="0000:15:00.0" class="0x120000" vendor="0x1002">
   <gpu dev="1" gcn="942"><xgmi target="0000:0c:00.0" count="1" tclass="0x120000"/></gpu>
  </pci>
  <nic><net name="bond0" dev="1" speed="10000" port="0" guid="0x0"/></nic>
 </cpu>
</system>"""

LINK = '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>'
SWITCHED = f"""<system version="1"><cpu numaid="-1" affinity="f">
 <pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="90">{LINK}</gpu></pci>
 <pci busid="0000:02:00.0" class="0x030200"><gpu dev="1" sm="90">{LINK}</gpu></pci>
</cpu></system>"""


def test_a_file_written_by_hand_has_no_numbers_and_no_names() -> None:
    node = read_nccl_xml(BARE)
    [gpu], [nic] = node.gpus or (), node.nics or ()
    assert (gpu.key, gpu.index, gpu.numa, gpu.cpus) == ("0003:00:00.0", None, (3,), frozenset(range(32, 36)))
    assert (nic.name, nic.kind, nic.rdma) == ("0103:00:00.0", "infiniband", None)
    assert node.nearest_nics(gpu) == ("PIX", [nic])


def test_a_dump_has_numbers_rates_and_links() -> None:
    node = read_nccl_xml(DUMPED)
    assert [(gpu.key, gpu.vendor) for gpu in node.gpus or ()] == [("GPU0", "amd"), ("GPU1", "amd")]
    near, far = node.nics or ()
    assert [(port.number, port.rate_gbps) for port in near.ports or ()] == [(1, 400.0)]
    assert node.nearest_nics(node.gpu(0), [near]) == ("PIX", [near])
    assert node.nearest_nics(node.gpu(1), [near]) == ("PHB", [near])
    assert (far.name, far.rdma, node.level(node.gpu(0), far)) == ("bond0", False, "PHB")
    link = node.link("GPU1", "GPU0")
    assert link is not None
    assert (link.kind, link.lanes) == ("xgmi", 1)


def test_links_to_switches_reach_every_gpu_that_has_them() -> None:
    node = read_nccl_xml(SWITCHED)
    link = node.link("GPU0", "GPU1")
    assert link is not None
    assert link.word == "NV18"
    assert node.numa is None


@pytest.mark.parametrize("text", [DUMPED[:300], "<graphs/>", "<system/>"])
def test_what_is_no_whole_topology_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"topo\.xml"):
        read_nccl_xml(text, "topo.xml")
