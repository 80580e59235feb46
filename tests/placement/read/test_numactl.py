from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dthpc.errors import UserError
from dthpc.placement.read.numactl import read_numactl
from dthpc.placement.topology import NumaNode


@st.composite
def nodes(draw: st.DrawFn) -> list[NumaNode]:
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=5)))
    first = 0
    made = []
    for number in numbers:
        size = draw(st.integers(0, 40))
        distances = {other: 10 if other == number else draw(st.sampled_from([12, 32, 255])) for other in numbers}
        made.append(
            NumaNode(number, frozenset(range(first, first + size)), draw(st.integers(0, 9)) << 20, None, distances)
        )
        first += size
    return made


def text_of(nodes: list[NumaNode]) -> str:
    lines = [f"available: {len(nodes)} nodes ({','.join(str(node.index) for node in nodes)})"]
    for node in nodes:
        lines += [
            f"node {node.index} cpus: {' '.join(map(str, sorted(node.cpus or ())))}".rstrip(),
            f"node {node.index} size: {(node.memory_bytes or 0) >> 20} MB",
            f"node {node.index} free: 0 MB",
        ]
    lines += ["node distances:", "node " + " ".join(f"{node.index:3}" for node in nodes)]
    lines += [f"{n.index:3}: " + " ".join(f"{value:3}" for value in (n.distances or {}).values()) for n in nodes]
    return "\n".join(lines) + "\n"


@given(nodes(), st.sampled_from([40, 66, 10_000]))
def test_nodes_come_out_as_they_went_in_also_where_lists_of_cpus_are_wrapped(made: list[NumaNode], width: int) -> None:
    lines = text_of(made).split("\n")
    wrapped = [piece for line in lines for piece in (textwrap.wrap(line, width) if "cpus:" in line else [line])]
    read = read_numactl("\n".join(wrapped))
    assert list(read.numa or ()) == made
    assert read.complete


def test_a_cut_text_is_told() -> None:
    text = text_of(
        [NumaNode(0, frozenset({0, 1}), 2**20, None, {0: 10}), NumaNode(1, frozenset({2}), 2**20, None, {0: 10})]
    )
    read = read_numactl(text[: text.index("node 1")])
    assert not read.complete
    assert "counts 2 memory nodes and shows 1" in read.notes[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("No NUMA available on this system\n", "no line"),
        ("node 0 cpus: 0 1\nnode 1 cpus: 1 2\n", "CPU 1 belongs to two"),
    ],
)
def test_what_contradicts_itself_or_tells_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_numactl(text)


@pytest.mark.parametrize("second", ["0  10", "21  11", "10  10"])
def test_distances_that_no_machine_has_are_left_out(second: str) -> None:
    head = "available: 2 nodes (0-1)\nnode 0 cpus: 0\nnode 0 size: 9 MB\nnode 1 cpus: 1\nnode 1 size: 9 MB\n"
    topology = read_numactl(f"{head}node distances:\nnode   0   1\n  0:  10  21\n  1:  {second}\n")
    told = [node.distances for node in topology.numa or ()]
    assert (told == [None, None]) == (second != "10  10")
    assert any("left out" in note for note in topology.notes) == (second != "10  10")
