from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.nvidia_list import read_nvidia_csv, read_nvidia_list, read_nvidia_query

LIST = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-a)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
  MIG 3g.40gb     Device  1: (UUID: MIG-2)
GPU 1: NVIDIA A100-SXM4-80GB
"""
XML = """<?xml version="1.0" ?><nvidia_smi_log>
<gpu id="00000000:3B:00.0"><product_name>NVIDIA H100</product_name><uuid>GPU-a</uuid>
 <mig_mode><current_mig>Enabled</current_mig></mig_mode><mig_devices><mig_device><index>0</index></mig_device></mig_devices>
 <fb_memory_usage><total>81559 MiB</total></fb_memory_usage></gpu>
<gpu id="00000000:5E:00.0"><uuid>GPU-b</uuid></gpu></nvidia_smi_log>"""


def test_instances_belong_to_the_gpu_above_them() -> None:
    node = read_nvidia_list(LIST)
    first, second = node.gpus or ()
    assert (first.uuid, first.model) == ("GPU-a", "NVIDIA A100-SXM4-80GB")
    assert [(part.kind, part.index, part.uuid, part.profile) for part in first.parts or ()] == [
        ("mig", 0, "MIG-1", "1g.10gb"),
        ("mig", 1, "MIG-2", "3g.40gb"),
    ]
    assert (second.uuid, second.parts) == (None, ())
    assert node.complete


def test_an_instance_that_is_cut_is_left_out_and_told() -> None:
    node = read_nvidia_list(LIST[: LIST.index("MIG-2")])
    assert len(node.gpu(0).parts or ()) == 1
    assert not node.complete


def test_the_xml_lists_gpus_by_their_numbers() -> None:
    first, second = read_nvidia_query(XML).gpus or ()
    assert (first.key, first.bus_id, first.uuid, first.memory_bytes) == ("GPU0", "0000:3b:00.0", "GPU-a", 81559 * 2**20)
    assert [part.index for part in first.parts or ()] == [0]
    assert (second.index, second.parts) == (1, ())


def test_a_query_as_csv() -> None:
    [gpu] = (
        read_nvidia_csv(
            "index, pci.bus_id, uuid, name, memory.total [MiB]\n3, 00000000:3B:00.0, GPU-a, X, 10 MiB\n"
        ).gpus
        or ()
    )
    assert (gpu.key, gpu.bus_id, gpu.uuid, gpu.model, gpu.memory_bytes) == (
        "GPU3",
        "0000:3b:00.0",
        "GPU-a",
        "X",
        10 * 2**20,
    )
    [bare] = read_nvidia_csv("pci.bus_id\n0000:3B:00.0\n").gpus or ()
    assert (bare.key, bare.index) == ("0000:3b:00.0", None)


@pytest.mark.parametrize(
    ("reader", "text", "why"),
    [
        (read_nvidia_list, "No devices found.\n", "lists no GPU"),
        (read_nvidia_query, XML[:200], "cut or damaged"),
        (read_nvidia_query, "<nvidia_smi_log/>", "lists no GPU"),
        (read_nvidia_csv, "name\nX\n", "neither index nor"),
        (read_nvidia_csv, "index, name\n0\n", "another number of cells"),
    ],
)
def test_other_texts_are_refused(reader: object, text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        reader(text)  # type: ignore[operator]


def test_a_list_that_was_pasted_twice_is_read_once() -> None:
    one = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.10gb     Device  0: (UUID: MIG-a)\n"
    assert read_nvidia_list(one + one) == read_nvidia_list(one)
    with pytest.raises(UserError, match="GPU0 stands there twice and differs"):
        read_nvidia_list(one + one.replace("GPU-1", "GPU-2"))
