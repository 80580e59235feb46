"""`lscpu`: as plain text, as JSON (`-J`), and one line a CPU (`-e`, `-p`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from dthpc.placement.cpuset import CpuSet, parse_cpus, parse_mask
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import Cache, Core, Counts, NumaNode, Package, Source, Topology

KIND = "lscpu"
INSTEAD = "save the output of `lscpu`, or of `lscpu -e=CPU,NODE,SOCKET,CORE,CACHE,ONLINE` for the cores"

_FIELD = re.compile(r"^[ \t]*([A-Z][^:\n]*?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.M)
_NODE = re.compile(r"NUMA node(\d+) CPU\(?s?\)?")
_COLUMNS = {"CPU": "cpu", "NODE": "node", "SOCKET": "socket", "CORE": "core", "ONLINE": "online"}


def read_lscpu(text: str, where: str = "lscpu") -> Topology:
    """The CPUs and memory nodes, and, of the forms with one line a CPU, packages, cores and shared caches.

    The plain form tells only how many cores there are, not which CPUs they are: that is not computed from the numbers.

    Raises:
        UserError: the text is none of lscpu's forms.
    """
    text = clean(text)
    if text.lstrip().startswith("{"):
        return _from_json(text, where)
    if re.search(r"^\s*CPU[ \t]+(?:[A-Z][\w:]*[ \t]*)+$", text, re.M):
        return _from_table(*_table(text, where), where)
    if re.search(r"^# ?CPU,", text, re.M):
        return _from_table(*_parsable(text), where)
    return _from_fields(_FIELD.findall(text), where)


def _from_json(text: str, where: str) -> Topology:
    try:
        content: dict[str, Any] = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise refuse(where, f"the JSON is cut or damaged ({error})", text[-80:], INSTEAD) from error
    if "cpus" in content:
        titles = list(dict.fromkeys(key.upper() for row in content["cpus"] for key in row))
        rows = [[_word(row.get(title.lower())) for title in titles] for row in content["cpus"]]
        return _from_table(titles, rows, where)
    return _from_fields(list(_flat(content.get("lscpu", []))), where)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _flat(entries: Iterable[Any]) -> Iterable[tuple[str, str]]:
    """The fields of all depths: newer versions put them in groups."""
    for entry in entries:
        yield str(entry.get("field", "")).rstrip(":"), entry.get("data") or ""
        yield from _flat(entry.get("children", []))


def _from_fields(fields: Sequence[tuple[str, str]], where: str) -> Topology:
    known = {name.strip(): value.strip() for name, value in fields}
    numbers = {int(match[1]): value for name, value in known.items() if (match := _NODE.fullmatch(name))}
    if not numbers and "CPU(s)" not in known:
        read = "; ".join(f"{name}: {value}" for name, value in fields[:3])
        raise refuse(where, "the text has neither a number of CPUs nor memory nodes", read, INSTEAD)
    nodes = [NumaNode(number, _list_or_none(value, where)) for number, value in sorted(numbers.items())]
    online = _online(known, "On-line CPU(s) ", where)
    offline = _online(known, "Off-line CPU(s) ", where)
    told = _count(known, "NUMA node(s)")
    notes = []
    if told is not None and told != len(nodes):
        notes.append(f"lscpu counts {told} memory nodes and lists {len(nodes)}")
    return Topology(
        existing=online,
        offline=offline,
        numa=tuple(nodes) or None,
        counts=Counts(
            cpus=_count(known, "CPU(s)"),
            packages=_count(known, "Socket(s)"),
            cores_per_package=_count(known, "Core(s) per socket"),
            threads_per_core=_count(known, "Thread(s) per core"),
            numa_nodes=told,
        ),
        complete=not notes,
        sources=(Source(KIND, where, ("cpus", "numa") if nodes else ("cpus",)),),
        notes=tuple(notes),
    )


def _list(text: str, where: str) -> CpuSet:
    """The CPUs of a node; without any, lscpu writes nothing or a sign for it."""
    if text in ("", "-", "null"):
        return frozenset()
    return parse_mask(text, where) if text.startswith("0x") else parse_cpus(text, where)


def _list_or_none(text: str, where: str) -> CpuSet | None:
    return None if text.upper() in ("N/A", "NA", "UNKNOWN", "?") else _list(text, where)


def _online(known: dict[str, str], name: str, where: str) -> CpuSet | None:
    text = known.get(name + "list") or known.get(name + "mask")
    return _list(text, where) if text else None


def _count(known: dict[str, str], name: str) -> int | None:
    value = known.get(name, "")
    return int(value) if value.isdigit() else None


def _table(text: str, where: str) -> tuple[list[str], list[list[str]]]:
    lines = [line.split() for line in text.split("\n") if line.strip()]
    start = next(place for place, words in enumerate(lines) if words[0] == "CPU")
    titles = lines[start]
    rows = [words for words in lines[start + 1 :] if words[0].isdigit()]
    for words in rows:
        # Columns at the end (clock rates) may be empty; those in the middle hold a dash where they are.
        if len(words) > len(titles):
            raise refuse(where, "a line has more cells than there are titles", " ".join(words), INSTEAD)
    return titles, rows


def _parsable(text: str) -> tuple[list[str], list[list[str]]]:
    titles = next(line for line in text.split("\n") if re.match(r"# ?CPU,", line)).lstrip("# ").upper().split(",")
    rows = [line.split(",") for line in text.split("\n") if re.match(r"\d+,", line)]
    return titles, rows


def _from_table(titles: Sequence[str], rows: Sequence[Sequence[str]], where: str) -> Topology:
    cpus = [dict(zip(titles, row, strict=False)) for row in rows]
    if not cpus or any(not row.get("CPU", "").isdigit() for row in cpus):
        raise refuse(where, "the table has no line of a CPU", " ".join(titles), INSTEAD)
    off = frozenset(int(row["CPU"]) for row in cpus if row.get("ONLINE") in ("no", "N", "0"))
    live = [row for row in cpus if int(row["CPU"]) not in off]
    packages = _groups(live, "SOCKET")
    return Topology(
        existing=frozenset(int(row["CPU"]) for row in live),
        offline=off if "ONLINE" in titles else None,
        packages=tuple(Package(int(name), group) for name, group in packages.items()) or None,
        numa=tuple(NumaNode(int(name), group) for name, group in sorted(_groups(live, "NODE").items(), key=_by_number))
        or None,
        caches=_caches(live, titles),
        cores=tuple(_cores(live)) or None,
        sources=(Source(KIND, where, ("cpus", "packages", "numa", "cores")),),
    )


def _by_number(item: tuple[str, CpuSet]) -> int:
    return int(item[0])


def _groups(rows: Sequence[dict[str, str]], title: str) -> dict[str, CpuSet]:
    found: dict[str, set[int]] = {}
    for row in rows:
        if row.get(title, "-").isdigit():
            found.setdefault(row[title], set()).add(int(row["CPU"]))
    return {name: frozenset(group) for name, group in found.items()}


def _cores(rows: Sequence[dict[str, str]]) -> Iterable[Core]:
    # Logical numbers of cores are unique in the node, unless a version counts within each socket.
    found: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row.get("CORE", "-").isdigit():
            found.setdefault((row.get("SOCKET", "-"), row["CORE"]), set()).add(int(row["CPU"]))
    for (socket, core), group in found.items():
        yield Core(frozenset(group), int(core), int(socket) if socket.isdigit() else None)


def _caches(rows: Sequence[dict[str, str]], titles: Sequence[str]) -> tuple[Cache, ...] | None:
    """The last cache of `L1d:L1i:L2:L3`; without the title's fourth place no L3 is known."""
    title = next((title for title in titles if title.upper().startswith("L1D:")), None)
    if title is not None:
        level = title.count(":")
        words = {row["CPU"]: row.get(title, "").split(":") for row in rows}
        found: dict[str, set[int]] = {}
        for cpu, places in words.items():
            if len(places) > level and places[level].isdigit():
                found.setdefault(places[level], set()).add(int(cpu))
        return tuple(Cache(frozenset(group)) for group in found.values()) or None
    return tuple(Cache(group) for group in _groups(rows, "L3").values()) or None
