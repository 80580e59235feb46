"""`numactl -H` (`--hardware`): memory nodes, their CPUs, sizes and distances."""

from __future__ import annotations

import re

from dthpc.placement.cpuset import CpuSet, parse_cpus
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import NumaNode, Source, Topology

KIND = "numactl"
INSTEAD = "save the output of `numactl -H`"

_CPUS = re.compile(r"node (\d+) cpus:([\d\s,-]*?)(?=\s*(?:node|available|$|[A-Za-z#$]))")
_SIZE = re.compile(r"node (\d+) size:\s*(\d+) (MB|GB|kB)")
_ROW = re.compile(r"^[ \t]*(\d+):((?:[ \t]+\d+)+)[ \t]*$", re.M)
_SELF = 10
"""Distance of a node from itself; smaller values are reserved (ACPI specification, table SLIT)."""

_UNIT = {"kB": 2**10, "MB": 2**20, "GB": 2**30}


def read_numactl(text: str, where: str = "numactl -H") -> Topology:
    """The memory nodes; long lists of CPUs may be wrapped.

    Raises:
        UserError: the text has no memory nodes, or is cut within the CPUs of one.
    """
    text = clean(text)
    cpus = {int(number): _cpus(words, where) for number, words in _CPUS.findall(text)}
    if not cpus:
        raise refuse(where, "there is no line `node 0 cpus: …`", text[:80], INSTEAD)
    notes = []
    head = re.search(r"available: (\d+) nodes?", text)
    if head and int(head[1]) != len(cpus):
        notes.append(f"numactl counts {head[1]} memory nodes and shows {len(cpus)}")
    twice = [cpu for node, own in cpus.items() for other, more in cpus.items() if node < other for cpu in own & more]
    if twice:
        raise refuse(where, f"CPU {twice[0]} belongs to two memory nodes", "", INSTEAD)
    sizes = {int(number): int(size) * _UNIT[unit] for number, size, unit in _SIZE.findall(text)}
    distances = _distances(text, notes)
    nodes = tuple(NumaNode(node, own, sizes.get(node), None, distances.get(node)) for node, own in sorted(cpus.items()))
    return Topology(
        existing=frozenset().union(*cpus.values()),
        numa=nodes,
        complete=not notes and set(sizes) == set(cpus),
        sources=(Source(KIND, where, ("cpus", "numa", "distances") if distances else ("cpus", "numa")),),
        notes=tuple(notes),
    )


def _cpus(words: str, where: str) -> CpuSet:
    return parse_cpus(",".join(words.replace(",", " ").split()), where)


def _distances(text: str, notes: list[str]) -> dict[int, dict[int, int]]:
    """The matrix below `node distances:`, whose header names the columns."""
    head = re.search(r"node distances:\s*\n[ \t]*node((?:[ \t]+\d+)+)", text)
    if head is None:
        return {}
    names = [int(word) for word in head[1].split()]
    table: dict[int, dict[int, int]] = {}
    for number, words in _ROW.findall(text[head.end() :]):
        row = [int(word) for word in words.split()]
        if len(row) == len(names):
            table[int(number)] = dict(zip(names, row, strict=True))
    if set(table) != set(names):
        notes.append("the distances are cut")
    own = all(row.get(node, _SELF) == min(row.values()) == _SELF for node, row in table.items())
    if not own:
        notes.append(f"the distances are left out: each node must be {_SELF} from itself, and none be nearer (ACPI)")
    return table if own else {}
