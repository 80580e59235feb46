"""The matrices of hwloc's XML: distances of memory nodes, and links between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

from dthpc.placement.topology import Link, NumaNode

_KINDS = {"NVLinkBandwidth": "nvlink", "XGMIBandwidth": "xgmi", "XGMIHops": "xgmi", "XeLinkBandwidth": "xelink"}


def numa_distances(root: ElementTree.Element, nodes: Sequence[NumaNode]) -> list[NumaNode]:
    """The nodes with their distances, where the file has the matrix.

    Version 1 stores latencies as multiples of a base, in the order of the nodes; later ones name the nodes.
    """
    table: dict[int, dict[int, int]] = {}
    for matrix in root.iter("distances2"):
        if matrix.get("type") == "NUMANode" and matrix.get("name", "NUMALatency") == "NUMALatency":
            if matrix.get("indexing") == "os":
                table = _square([int(word) for word in _words(matrix, "indexes")], _values(matrix))
            break
    for old in root.iter("distances"):
        values = [float(cell.get("value", "0")) * float(old.get("latency_base", "1")) for cell in old.iter("latency")]
        if int(old.get("nbobjs", "0")) == len(nodes) and not table:
            table = _square([node.index for node in nodes], [round(value) for value in values])
    return [replace(node, distances=table.get(node.index)) for node in nodes]


def device_links(root: ElementTree.Element, numbers: Mapping[str, str]) -> list[Link]:
    """The links between GPUs, also those through a switch that both reach.

    Args:
        root: the whole file.
        numbers: key of a GPU, or bus id of another function, by `type:gp_index`.
    """
    found: dict[frozenset[str], Link] = {}
    for matrix in (*root.iter("distances2"), *root.iter("distances2hetero")):
        kind = _KINDS.get(matrix.get("name", ""))
        if kind is None:
            continue
        prefix = f"{matrix.get('type')}:" if matrix.tag == "distances2" else ""
        keys = [numbers.get(prefix + word, "") for word in _words(matrix, "indexes")]
        values = _values(matrix)
        if len(values) != len(keys) ** 2:
            continue
        hops = matrix.get("name") == "XGMIHops"
        for link in _pairs(keys, values, kind, hops):
            found.setdefault(frozenset((link.a, link.b)), link)
    return list(found.values())


def _pairs(keys: Sequence[str], values: Sequence[int], kind: str, hops: bool) -> Iterator[Link]:
    size = len(keys)
    reach = [{other for other in range(size) if other != one and values[one * size + other] > 0} for one in range(size)]
    gpus = [place for place, key in enumerate(keys) if key.startswith("GPU")]
    for a, b in combinations(gpus, 2):
        switches = {place for place in reach[a] & reach[b] if place not in gpus}
        if b in reach[a] or switches:
            yield Link(keys[a], keys[b], kind=kind, hops=values[a * size + b] if hops else None)


def _square(names: Sequence[int], values: Sequence[int]) -> dict[int, dict[int, int]]:
    size = len(names)
    if len(values) != size * size:
        return {}
    return {a: {b: values[row * size + column] for column, b in enumerate(names)} for row, a in enumerate(names)}


def _words(matrix: ElementTree.Element, tag: str) -> list[str]:
    return [word for part in matrix.iter(tag) for word in (part.text or "").split()]


def _values(matrix: ElementTree.Element) -> list[int]:
    return [int(word) for word in _words(matrix, "u64values")]
