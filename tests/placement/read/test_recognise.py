from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.recognise import kinds_of, read_path, read_text

TOPO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\nGPU1\tNV4\t X \t4-7\n"
TEXTS = {
    "nvidia-smi topo": TOPO,
    "rocm-smi": "GPU[0]\t\t: (Topology) Numa Node: 0\n",
    "amd-smi": "GPU: 0\n    BDF: 0000:0c:00.0\n",
    "nvidia-smi -L": "GPU 0: NVIDIA A100 (UUID: GPU-1)\n",
    "nvidia-smi csv": "index, pci.bus_id\n0, 0000:3b:00.0\n",
    "lscpu": "CPU(s):    4\nNUMA node0 CPU(s):   0-3\n",
    "numactl": "available: 1 nodes (0)\nnode 0 cpus: 0 1 2 3\nnode 0 size: 9 MB\n",
    "ibstat": "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tLink layer: InfiniBand\n",
    "ibstatus": "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n",
    "ibv_devinfo": "hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tstate:\tPORT_ACTIVE (4)\n",
    "ibdev2netdev": "mlx5_0 port 1 ==> ib0 (Up)\n",
    "slurm node": "NodeName=n1 Arch=x86_64 CoresPerSocket=1\n   CPUTot=2 Sockets=2\n",
    "slurm gres": "NodeName=n1 Name=gpu File=/dev/nvidia0\n",
    "slurmd": "NodeName=n1 CPUs=2 Boards=1 CoresPerSocket=2\n",
    "hwloc": '<topology><object type="Machine"><object type="PU" os_index="0"/></object></topology>',
    "nccl topology": '<system version="1"><cpu numaid="0" affinity="f"/></system>',
    "nvidia-smi -q -x": '<nvidia_smi_log><gpu id="0000:01:00.0"/></nvidia_smi_log>',
}


@pytest.mark.parametrize("kind", TEXTS)
def test_each_kind_is_known_by_its_content_and_read(kind: str) -> None:
    assert kinds_of(TEXTS[kind]) == [kind]
    assert read_text(TEXTS[kind], "file").sources[0].kind == kind


def test_a_report_of_several_tools_is_put_together() -> None:
    node = read_text(
        "\n".join(["$ nvidia-smi topo -m", TOPO, "$ lscpu", TEXTS["lscpu"], "$ ibstat", TEXTS["ibstat"]]), "report.txt"
    )
    assert [source.kind for source in node.sources] == ["nvidia-smi topo", "lscpu", "ibstat"]
    assert node.existing is None
    assert node.counts.cpus == 4
    assert len(node.gpus or ()) == 2
    assert node.nic("mlx5_0").usable


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("bash: nvidia-smi: command not found\n", "the tool failed"),
        ("No devices were found\n", "No devices were found"),
        ("No NUMA available on this system\n", "the tool failed"),
        ("Architecture :          x86_64\nProcesseur(s) :        8\n", "LC_ALL=C lscpu"),
        ("Machine (251GB total)\n  Package L#0\n", "its XML is needed"),
        ("GPU0 was busy and X did not help\n", "no output that is known"),
        ("<graphs version='1'/>", "no output that is known"),
        ("{}", "no output that is known"),
    ],
)
def test_other_texts_are_refused_with_what_to_give(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        read_text(text, "file")
    assert "lstopo" in (caught.value.instead or "")


def test_files_of_other_encodings_and_no_texts(tmp_path: Path) -> None:
    (tmp_path / "utf16.txt").write_bytes(b"\xff\xfe" + TOPO.encode("utf-16-le"))
    assert len(read_path(tmp_path / "utf16.txt").gpus or ()) == 2
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    with pytest.raises(UserError, match="neither a text"):
        read_path(tmp_path / "image.png")
    with pytest.raises(UserError, match="cannot be read"):
        read_path(tmp_path / "absent")


def test_an_endless_file_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(UserError, match="more than 64 MiB tells of no node"):
        read_path("/dev/zero")


def test_gaps_and_endless_lines_do_not_matter() -> None:
    for junk in ("\n" * 100_000, " " * 100_000 + "\n", "x" * 100_000 + "\n", " \f\n" * 50_000):
        assert len(read_text(junk + TOPO + junk, "n").gpus or ()) == 2
    for nonsense in ("{" * 100_000, '{"a":' * 50_000 + "\n", "GPU0 X " * 100_000):
        with pytest.raises(UserError, match="no output that is known"):
            read_text(nonsense, "n")
