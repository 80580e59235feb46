"""`nvidia-smi topo -m` (and `-mp`): how near GPUs and NICs are to each other, and each GPU's CPUs and memory node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, parse_cpus
from dthpc.placement.read.cells import ACCELERATOR
from dthpc.placement.read.matrix import INSTEAD, Matrix, Row, read_matrices
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import LEVELS, Gpu, Link, Nic, Source, Topology

KIND = "nvidia-smi topo"

_LEGEND = re.compile(r"\b(NIC\d+)\s*[:=]\s*([A-Za-z][\w.-]*)")
_VENDOR = {"GPU": "nvidia", "DCU": "hygon", "NPU": "ascend"}
_FAST = {"HCCS": "hccs", "HCCS_SW": "hccs", "SIO": "sio", "XGMI": "xgmi", "C2C": "c2c"}


def read_nvidia_topo(text: str, where: str = "nvidia-smi topo -m") -> Topology:
    """The devices and levels of the text's first matrix.

    A second matrix of the same devices adds what the first hides (`-mp` shows the PCIe level below NVLink); one of
    other devices is of another machine and is noted, as are matrices of peer-to-peer abilities.

    Raises:
        UserError: there is no matrix, or it cannot be read without guessing.
    """
    text = clean(text)
    matrices = read_matrices(text, where)
    telling = [matrix for matrix in matrices if matrix.tells_levels or _alone(matrix)]
    if not telling:
        why = "the matrix shows peer-to-peer abilities and no distances" if matrices else "there is no matrix of GPUs"
        raise refuse(where, why, next((line for line in text.split("\n") if line.strip()), ""), INSTEAD)
    main = telling[0]
    names, notes = _legend(text, main, telling[1:], where)
    return _topology(main, telling[1:], names, [*main.notes, *notes], where)


def _alone(matrix: Matrix) -> bool:
    return [cell for row in matrix.rows.values() for cell in row.cells] == ["X"]


def _legend(text: str, main: Matrix, others: Sequence[Matrix], where: str) -> tuple[dict[str, str], list[str]]:
    """The names of NIC0, NIC1, … below the matrix, and notes on those that have none."""
    end = next((other.first_line for other in others if other.columns != main.columns), None)
    lines = text.split("\n")
    below = "\n".join(lines[main.last_line + 1 : end])
    names: dict[str, str] = {}
    entries = _LEGEND.findall(below.replace("\\_", "_"))
    if entries and below.endswith(entries[-1][1]) and not _whole(entries):
        entries.pop()
    for place, name in entries:
        if names.setdefault(place, name) != name:
            raise refuse(where, f"the legend names {place} twice", f"{place}: {names[place]}, {place}: {name}", INSTEAD)
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        raise refuse(where, "the legend gives one name to two NICs", twice[0], INSTEAD)
    nameless = [name for name in main.columns if re.fullmatch(r"NIC\d+", name) and name not in names]
    notes = [f"the text does not tell the names of {', '.join(nameless)}"] if nameless else []
    return names, notes


def _whole(entries: Sequence[tuple[str, str]]) -> bool:
    """Whether the last name of a legend, at the very end of a text, is formed as the others are, and not cut."""
    *others, last = (name for _, name in entries)
    formed = re.fullmatch(r"mlx\d+_\w*\d" if "mlx".startswith(last[:3]) else r".*\d", last)
    stems = {re.sub(r"\d+$", "", name) for name in others}
    return formed is not None and last not in others and (not stems or re.sub(r"\d+$", "", last) in stems)


def _topology(main: Matrix, others: Sequence[Matrix], names: dict[str, str], notes: list[str], where: str) -> Topology:
    complete = main.complete
    same = [other for other in others if other.columns == main.columns and _agrees(main, other)]
    if len(same) < len(others):
        notes.append("the text holds several matrices that do not belong together; the first is read")
        complete = False
    gpus = tuple(_gpu(main.rows.get(name), name, where) for name in main.columns if re.fullmatch(ACCELERATOR, name))
    others_named = [name for name in main.columns if not re.fullmatch(ACCELERATOR, name)]
    nics = tuple(Nic(name=names.get(name, name), rdma=True) for name in others_named)
    if any(name not in main.rows for name in others_named):
        complete = False
        notes.append("the rows of the NICs are cut")
    links = tuple(_links(main, same, names))
    notes += _oddities(main, gpus)
    told = ("gpus", *(["nics"] if nics else []), *(["links"] if links else []))
    source = Source(KIND, where, told)
    return Topology(
        gpus=gpus, nics=nics, links=links, complete=complete, sources=(source,), notes=tuple(dict.fromkeys(notes))
    )


def _agrees(main: Matrix, other: Matrix) -> bool:
    """Whether a second matrix of the same devices can be of the same machine."""
    for a, b in combinations(main.columns, 2):
        first, second = main.cell(a, b), other.cell(a, b)
        if first != second and first in LEVELS and second in LEVELS:
            return False
    shared = [(row.tail, other.rows[name].tail) for name, row in main.rows.items() if name in other.rows]
    return all(a.get(label) == value for a, b in shared for label, value in b.items() if label in a)


def _gpu(row: Row | None, name: str, where: str) -> Gpu:
    tail = row.tail if row is not None else {}
    numa = _set(tail, "NUMA_AFFINITY", name, where)
    memory = _set(tail, "GPU_NUMA_ID", name, where)
    if memory is not None and len(memory) != 1:
        raise refuse(where, f"{name} has several memory nodes of its own", tail["GPU_NUMA_ID"], INSTEAD)
    return Gpu(
        key=name,
        index=int(re.sub(r"\D", "", name)),
        vendor=_VENDOR[name[:3]],
        compute=True,
        numa=None if numa is None else tuple(sorted(numa)),
        cpus=_set(tail, "CPU_AFFINITY", name, where),
        memory_numa=None if memory is None else next(iter(memory)),
    )


def _set(tail: dict[str, str], label: str, name: str, where: str) -> CpuSet | None:
    value = tail.get(label)
    if value is None:
        return None
    try:
        return parse_cpus(value)
    except UserError as error:
        title = label.replace("_", " ").title()
        raise refuse(where, f"the {title} of {name} is no list: {error.why}", value, INSTEAD) from error


def _links(main: Matrix, same: Sequence[Matrix], names: dict[str, str]) -> list[Link]:
    made = []
    for a, b in combinations(main.columns, 2):
        said = main.cell(a, b)
        hidden = next((cell for other in same if (cell := other.cell(a, b)) in (*LEVELS, "SOC")), None)
        if said is not None:
            made.append(_link(names.get(a, a), names.get(b, b), said, hidden))
    return made


def _link(a: str, b: str, said: str, hidden: str | None) -> Link:
    level = {"SOC": "SYS"}.get(hidden or said, hidden or said)
    known = level if level in LEVELS else None
    lanes = re.fullmatch(r"NV(\d+)", said)
    if lanes:
        return Link(a, b, level=known, kind="nvlink", lanes=int(lanes[1]), said=said)
    return Link(a, b, level=known, kind=_FAST.get(said), said=said)


def _oddities(main: Matrix, gpus: Sequence[Gpu]) -> list[str]:
    """What a reader of the placement should know of the affinities."""
    notes = []
    blank = [gpu.key for gpu in gpus if gpu.cpus is None]
    if "CPU_AFFINITY" in main.labels and blank and len(blank) < len(gpus):
        notes.append(f"no CPU near {', '.join(blank)} is among those that the process may use, or their rows are cut")
    for one, other in combinations([gpu for gpu in gpus if gpu.cpus and gpu.numa], 2):
        if one.numa == other.numa and one.cpus != other.cpus:
            notes.append(f"{one.key} and {other.key} share memory node {one.numa} but not their CPUs")
            break
        if not set(one.numa or ()) & set(other.numa or ()) and (one.cpus or set()) & (other.cpus or set()):
            notes.append(f"{one.key} and {other.key} share CPUs but not their memory node")
            break
    return notes
