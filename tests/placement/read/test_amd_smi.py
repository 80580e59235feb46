from __future__ import annotations

import json

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.amd_smi import read_amd_smi, read_rocm_smi

MATRIX = "==== {} between two GPUs ====\n       GPU0         GPU1\nGPU0   0            {}\nGPU1   {}           0\n\n"
TOPO = (
    "======= ROCm System Management Interface =======\nWARNING: AMD GPU device(s) is/are in a low-power state.\n\n"
    + MATRIX.format("Weight", 15, 15)
    + MATRIX.format("Hops", 1, 1)
    + MATRIX.format("Link Type", "XGMI", "XGMI")
    + "==== Numa Nodes ====\nGPU[0]\t\t: (Topology) Numa Node: 3\nGPU[0]\t\t: (Topology) Numa Affinity: 3\n"
    + "GPU 1          : (Topology) Numa Node: 1\nGPU 1          : (Topology) Numa Affinity: -1\n"
    + "==== End of ROCm SMI Log ====\n"
)
AMD = """WEIGHT TABLE:
             0000:0c:00.0 0000:22:00.0
0000:0c:00.0 0            15
0000:22:00.0 15           0

LINK TYPE TABLE:
             0000:0c:00.0 0000:22:00.0
0000:0c:00.0 SELF         XGMI
0000:22:00.0 XGMI         SELF
"""


def test_three_matrices_and_the_memory_nodes() -> None:
    node = read_rocm_smi(TOPO)
    assert [(gpu.key, gpu.numa) for gpu in node.gpus or ()] == [("GPU0", (3,)), ("GPU1", (1,))]
    link = node.link("GPU1", "GPU0")
    assert link is not None
    assert (link.kind, link.hops, link.weight, link.word) == ("xgmi", 1, 15, "XGMI")
    assert node.complete


def test_bus_ids_alone_and_a_cut_line() -> None:
    node = read_rocm_smi("GPU[0]\t\t: PCI Bus: 0000:C1:00.0\nGPU[1]\t\t: PCI Bus: 0000:C6:00.0\n")
    assert [gpu.bus_id for gpu in node.gpus or ()] == ["0000:c1:00.0", "0000:c6:00.0"]
    cut = read_rocm_smi(TOPO[: TOPO.index("GPU 1          : (Topology) Numa Node")])
    assert cut.gpu(1).numa is None
    assert "GPU 1" in cut.notes[0]


def test_links_without_xgmi_are_told_by_their_word() -> None:
    node = read_rocm_smi(MATRIX.format("Link Type", "PCIE", "PCIE"))
    link = node.link("GPU0", "GPU1")
    assert link is not None
    assert (link.kind, link.word) == (None, "PCIE")


def test_json_says_the_same() -> None:
    system = {
        "(Topology) Weight between DRM devices 0 and 1": "15",
        "(Topology) Link type between DRM devices 0 and 1": "XGMI",
    }
    card = {"(Topology) Numa Node": "3", "(Topology) Numa Affinity": "3", "PCI Bus": "0000:C1:00.0"}
    node = read_rocm_smi(json.dumps({"system": system, "card0": card, "card1": {"(Topology) Numa Node": "1"}}))
    assert [(gpu.key, gpu.numa, gpu.bus_id) for gpu in node.gpus or ()] == [
        ("GPU0", (3,), "0000:c1:00.0"),
        ("GPU1", (1,), None),
    ]
    link = node.link("GPU0", "GPU1")
    assert link is not None
    assert (link.kind, link.weight) == ("xgmi", 15)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MATRIX.format("Hops", 1, 2), "contradicts itself"),
        ("GPU[0] : (Topology) Numa Node: 1\nGPU[0] : (Topology) Numa Node: 2\n", "two values"),
        ("GPU[0] was fine\n", "nothing of a GPU"),
    ],
)
def test_contradictions_and_other_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_rocm_smi(text)


def test_amd_smi_names_gpus_by_bus_id() -> None:
    listed = "GPU: 0\n    BDF: 0000:22:00.0\n    UUID: aa\n\nGPU: 1\n    BDF: 0000:0c:00.0\n    UUID: bb\n"
    assert [gpu.bus_id for gpu in read_amd_smi(AMD).gpus or ()] == ["0000:0c:00.0", "0000:22:00.0"]
    both = read_amd_smi(f"{listed}\n{AMD}")
    assert [(gpu.key, gpu.bus_id) for gpu in both.gpus or ()] == [("GPU0", "0000:22:00.0"), ("GPU1", "0000:0c:00.0")]
    link = both.link("GPU0", "GPU1")
    assert link is not None
    assert link.weight == 15
    with pytest.raises(UserError):
        read_amd_smi("ERROR: no driver\n")


def test_lost_blanks_change_nothing_and_broken_matrices_are_told() -> None:
    lines = "GPU[0]: (Topology) Numa Node: 1\nGPU[1]: (Topology) Numa Node: 0\n"
    assert read_rocm_smi(lines.replace(": ", ":")) == read_rocm_smi(lines)
    broken = read_rocm_smi(f"= Link Type between two GPUs =\n   GP\nU0\n{lines}")
    assert not broken.complete
    assert broken.notes == ("the matrices of links are cut or broken, and are not read",)
