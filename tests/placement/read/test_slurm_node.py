from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.slurm_node import read_gres, read_slurm_node, read_slurmd

NODE = """NodeName={} Arch=x86_64 CoresPerSocket=64
   CPUAlloc=0 CPUEfctv=254 CPUTot=256 CPULoad=0.1
   Gres=gpu:a100:{}(S:0-1)
   RealMemory=1024 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=2
"""


def test_the_counts_of_a_node() -> None:
    node = read_slurm_node(NODE.format("n1", 4))
    counts = node.counts
    assert (node.host, counts.cpus, counts.packages, counts.cores_per_package) == ("n1", 256, 2, 64)
    assert (counts.threads_per_core, counts.gpus, counts.memory_bytes) == (2, 4, 2**30)
    assert node.gpus is None


def test_of_several_nodes_the_first_is_read_and_a_difference_told() -> None:
    assert "differ" in read_slurm_node(f"{NODE.format('n1', 4)}\n{NODE.format('n2', 8)}").notes[-1]
    assert "n1 is read" in read_slurm_node(f"{NODE.format('n1', 4)}\n{NODE.format('n2', 4)}").notes[-1]


def test_what_a_node_finds_for_itself() -> None:
    text = "NodeName=n1 CPUs=256 Boards=1 SocketsPerBoard=2 CoresPerSocket=64 ThreadsPerCore=2\nUpTime=1-02\n"
    assert read_slurmd(text).counts == read_slurmd(text.replace("SocketsPerBoard", "Sockets")).counts
    assert read_slurmd(text).counts.packages == 2


def test_gres_conf_has_gpus_in_order_and_no_cpus() -> None:
    text = "# comment\nNodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia[0-1] Cores=0-15 Links=-1,4\n"
    text += "Name=gpu File=/dev/dri/card2\n"
    node = read_gres(text)
    assert [(gpu.key, gpu.vendor, gpu.cpus) for gpu in node.gpus or ()] == [
        ("GPU0", "nvidia", None),
        ("GPU1", "nvidia", None),
        ("GPU2", "amd", None),
    ]
    link = node.link("GPU0", "GPU1")
    assert link is not None
    assert link.lanes == 4
    assert "Slurm's own numbers" in node.notes[0]
    assert read_gres("Name=gpu Count=4\n").counts.gpus == 4


@pytest.mark.parametrize("reader", [read_slurm_node, read_slurmd, read_gres])
def test_other_texts_are_refused(reader: object) -> None:
    with pytest.raises(UserError):
        reader("slurm_load_node error: Invalid node name specified\n")  # type: ignore[operator]
