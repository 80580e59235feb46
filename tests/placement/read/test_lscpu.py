from __future__ import annotations

import json

import pytest

from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus
from dthpc.placement.read.lscpu import read_lscpu

PLAIN = """Architecture:        x86_64
CPU(s):              8
On-line CPU(s) list: 0-5
Off-line CPU(s) list: 6,7
Thread(s) per core:  2
Core(s) per socket:  2
Socket(s):           -
NUMA node(s):        3
NUMA node0 CPU(s):   0-1,4
NUMA node1 CPU(s):   2-3,5
NUMA node9 CPU(s):
Flags:               fpu
"""
TABLE = """CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE    MAXMHZ
  0    0      0    0 0:0:0:0          yes 3800.0000
  1    0      0    1 1:1:1:0          yes 3800.0000
  2    0      0    0 0:0:0:0          yes 3800.0000
  3    1      1    1 2:2:2:1          yes
  4    -      -    - -                 no         -
"""
CORES = [({0, 2}, 0, 0), ({1}, 1, 0), ({3}, 1, 1)]


def test_the_plain_form_counts_cores_and_does_not_say_which_they_are() -> None:
    node = read_lscpu(PLAIN)
    assert (node.existing, node.offline) == (frozenset(range(6)), {6, 7})
    assert [(n.index, format_cpus(n.cpus or ())) for n in node.numa or ()] == [(0, "0-1,4"), (1, "2-3,5"), (9, "")]
    assert (node.counts.cpus, node.counts.packages, node.counts.cores_per_package) == (8, None, 2)
    assert node.cores is None


def test_json_says_the_same_in_lists_or_in_groups() -> None:
    fields = [
        {"field": f"{name}:", "data": value.strip() or None}
        for name, value in (x.split(":", 1) for x in PLAIN.splitlines())
    ]
    for entries in (fields, [{"field": "CPU(s):", "data": "8", "children": fields}]):
        node = read_lscpu(json.dumps({"lscpu": entries}))
        assert (node.numa, node.counts, node.existing) == (
            read_lscpu(PLAIN).numa,
            read_lscpu(PLAIN).counts,
            read_lscpu(PLAIN).existing,
        )


def test_one_line_a_cpu_tells_cores_packages_and_caches() -> None:
    titles, *rows = (line.split() for line in TABLE.splitlines())
    entries = [{title.lower(): word for title, word in zip(titles, row, strict=False)} for row in rows]
    lines = ["0,0,0,0,,0,0,0,0", "1,1,0,0,,1,1,1,0", "2,0,0,0,,0,0,0,0", "3,1,1,1,,2,2,2,1"]
    parsable = "\n".join(["# CPU,Core,Socket,Node,,L1d,L1i,L2,L3", *lines])
    for text in (TABLE, json.dumps({"cpus": entries}), parsable):
        node = read_lscpu(text)
        assert [(core.cpus, core.index, core.package) for core in node.cores or ()] == CORES
        assert [cache.cpus for cache in node.caches or ()] == [{0, 1, 2}, {3}]
        assert [package.cpus for package in node.packages or ()] == [{0, 1, 2}, {3}]
    assert read_lscpu(TABLE).offline == {4}


@pytest.mark.parametrize("text", ["nothing: here\n", '{"lscpu": [', "CPU NODE SOCKET\nnone\n", "CPU NODE\n 0 0 0 0\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="lscpu"):
        read_lscpu(text)


def test_memory_nodes_that_were_cut_away_are_told() -> None:
    node = read_lscpu(PLAIN.replace("NUMA node1 CPU(s):   2-3,5\n", ""))
    assert not node.complete
    assert "counts 3 memory nodes and lists 2" in node.notes[0]


def test_unknown_cpus_of_a_node_are_unknown_and_dashes_of_a_web_page_are_hyphens() -> None:
    read = read_lscpu("CPU(s): 16\nNUMA node0 CPU(s): 0\u20137\nNUMA node1 CPU(s): N/A\n")
    assert [node.cpus for node in read.numa or ()] == [frozenset(range(8)), None]
