"""`rocm-smi` (`--showtopo`, `--showtoponuma`, `--showbus`, …) and `amd-smi` (`topology`, `list`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from dthpc.errors import UserError
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import Gpu, Link, Source, Topology, bus_id

KIND = "rocm-smi"
KIND_AMD = "amd-smi"
INSTEAD = "save the output of `rocm-smi --showtopo --showbus`, or of `amd-smi topology` and `amd-smi list`"

_LINE = re.compile(r"^\s*GPU ?\[?(\d+)\]?\s*:\s*(.*?)\s*$", re.M)
_HEAD = re.compile(r"^\s*(?:GPU\d+\s*)+$")
_ROW = re.compile(r"^\s*GPU(\d+)\s+(.*)$")
_AMD_TITLES = {"ACCESS TABLE": "access", "WEIGHT TABLE": "weight", "HOPS TABLE": "hops", "LINK TYPE TABLE": "type"}
_ROCM_TITLES = {"Weight between": "weight", "Hops between": "hops", "Link Type between": "type"}

Table = dict[tuple[str, str], str]


def read_rocm_smi(text: str, where: str = "rocm-smi --showtopo") -> Topology:
    """The GPUs, their memory nodes, and how they are linked.

    Weights, hops and kinds of links are three matrices in one text; parts may be missing.

    Raises:
        UserError: the text tells nothing of a GPU, or two lines contradict each other.
    """
    text = clean(text)
    if text.lstrip().startswith("{"):
        text = _lines_of_json(text, where)
    facts = _facts(text, where)
    tables = {**_json_tables(text), **dict(_tables(text, where))}
    names = {a for table in tables.values() for pair in table for a in pair}
    numbers = sorted({*facts, *(int(name) for name in names)})
    if not numbers:
        raise refuse(where, "the text tells nothing of a GPU", text[:80], INSTEAD)
    gpus = tuple(_gpu(number, facts.get(number, {})) for number in numbers)
    links = tuple(_links([str(number) for number in numbers], tables, where))
    notes = _notes(text, facts, numbers)
    if len(numbers) > 1 and not links and re.search(r"between two GPUs", text, re.I):
        notes.append("the matrices of links are cut or broken, and are not read")
    told = ("gpus", "links") if links else ("gpus",)
    return Topology(
        gpus=gpus, links=links or None, complete=not notes, sources=(Source(KIND, where, told),), notes=tuple(notes)
    )


def read_amd_smi(text: str, where: str = "amd-smi topology") -> Topology:
    """The GPUs of `amd-smi topology` (matrices by bus id) and of `amd-smi list` (one block a GPU).

    Raises:
        UserError: the text tells nothing of a GPU.
    """
    text = clean(text)
    listed = {int(number): body for number, body in re.findall(r"^GPU: (\d+)\n((?:[ \t]+.*\n?)*)", text, re.M)}
    tables = dict(_amd_tables(text))
    addresses = list(dict.fromkeys(a for table in tables.values() for pair in table for a in pair))
    gpus = [_listed(number, body) for number, body in sorted(listed.items())]
    if not gpus:
        # The matrices go by bus id, in the order of amd-smi's numbers.
        gpus = [
            Gpu(f"GPU{place}", place, address, vendor="amd", compute=True) for place, address in enumerate(addresses)
        ]
    if not gpus:
        raise refuse(where, "the text tells nothing of a GPU", text[:80], INSTEAD)
    keys = {gpu.bus_id: gpu.key for gpu in gpus}
    links = tuple(_links(addresses, tables, where, {name: keys.get(name, name) for name in addresses}))
    return Topology(gpus=tuple(gpus), links=links or None, sources=(Source(KIND_AMD, where, ("gpus", "links")),))


def _lines_of_json(text: str, where: str) -> str:
    """The lines of the plain form out of `--json`, which nests the same words by card."""
    try:
        content: dict[str, dict[str, str]] = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise refuse(where, f"the JSON is cut or damaged ({error})", text[-80:], INSTEAD) from error
    cards = [(name.removeprefix("card"), known) for name, known in content.items() if re.fullmatch(r"card\d+", name)]
    lines = [f"GPU[{number}] : {name}: {value}" for number, known in cards for name, value in known.items()]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in content.get("system", {}).items())])


def _json_tables(text: str) -> dict[str, Table]:
    """`(Topology) Weight between DRM devices 0 and 1: 15`, as `--json` writes a matrix."""
    tables: dict[str, Table] = {}
    pattern = r"^\(Topology\) (Weight|Hops|Link type) between DRM devices (\d+) and (\d+): (\S+)"
    for title, a, b, value in re.findall(pattern, text, re.M | re.I):
        tables.setdefault({"link type": "type"}.get(title.lower(), title.lower()), {})[a, b] = value
    return tables


def _facts(text: str, where: str) -> dict[int, dict[str, str]]:
    """What lines such as `GPU[0] : (Topology) Numa Node: 3` say of each GPU."""
    facts: dict[int, dict[str, str]] = {}
    for number, rest in _LINE.findall(text):
        told = re.sub(r"^\((?:Topology|XGMI)\)\s*", "", rest)
        # Blanks may be lost; bus ids have colons of their own.
        name, colon, value = told.rpartition(": ") if ": " in told else told.partition(":")
        name = name.strip().lower()
        if not colon or not name:
            continue
        earlier = facts.setdefault(int(number), {}).setdefault(name, value.strip())
        if earlier != value.strip() and name.startswith("numa"):
            raise refuse(where, f"GPU {number} has two values of {name!r}", f"{earlier}, {value}", INSTEAD)
    return facts


def _gpu(number: int, facts: dict[str, str]) -> Gpu:
    # The node is the firmware's; the affinity is the kernel's, which has -1 where it knows none.
    words = [facts.get(name, "") for name in ("numa affinity", "numa node")]
    nodes = [int(word) for word in words if word.isdigit()]
    return Gpu(
        key=f"GPU{number}",
        index=number,
        bus_id=bus_id(facts.get("pci bus", "")),
        uuid=facts.get("unique id"),
        vendor="amd",
        model=facts.get("card series"),
        compute=True,
        numa=(nodes[0],) if nodes else None,
    )


def _listed(number: int, body: str) -> Gpu:
    known = dict(re.findall(r"^\s*([A-Z_]+):\s*(\S+)", body, re.M))
    node = known.get("NUMA_NODE") or known.get("NODE") or ""
    return Gpu(
        key=f"GPU{number}",
        index=number,
        bus_id=bus_id(known.get("BDF", "")),
        uuid=known.get("UUID"),
        vendor="amd",
        compute=True,
        numa=(int(node),) if known.get("NUMA_NODE", "").isdigit() else None,
    )


def _tables(text: str, where: str) -> Iterator[tuple[str, Table]]:
    """The matrices of rocm-smi by what they tell; rows that were cut are left out."""
    title: str | None = None
    columns: list[str] = []
    table: Table = {}
    for line in text.split("\n"):
        found = next((kind for words, kind in _ROCM_TITLES.items() if words in line), None)
        row = _ROW.match(line)
        if found or line.startswith("==="):
            if title and table:
                yield title, table
            title, columns, table = found, [], {}
        elif title and _HEAD.match(line):
            columns = re.findall(r"GPU(\d+)", line)
        elif title and columns and row:
            words = row[2].split()
            if len(words) > len(columns):
                raise refuse(where, f"a row of the {title} has more cells than there are GPUs", line, INSTEAD)
            table.update({(row[1], column): word for column, word in zip(columns, words, strict=False)})
    if title and table:
        yield title, table


def _amd_tables(text: str) -> Iterator[tuple[str, Table]]:
    for head, body in re.findall(r"^([A-Z ]+TABLE):\s*\n((?:.+\n?)*)", text, re.M):
        kind = _AMD_TITLES.get(head.strip())
        lines = [line.split() for line in body.split("\n") if line.strip()]
        if kind is None or not lines:
            continue
        columns = [bus_id(word) or word for word in lines[0]]
        yield (
            kind,
            {
                (bus_id(words[0]) or words[0], column): word
                for words in lines[1:]
                for column, word in zip(columns, words[1:], strict=False)
            },
        )


def _links(
    names: Sequence[str], tables: dict[str, Table], where: str, keys: dict[str, str] | None = None
) -> Iterator[Link]:
    """One link for each pair of which any matrix tells."""
    for a, b in combinations(names, 2):
        kind = _pair(tables.get("type", {}), a, b, where)
        hops = _pair(tables.get("hops", {}), a, b, where)
        weight = _pair(tables.get("weight", {}), a, b, where)
        if kind is None and hops is None and weight is None:
            continue
        fast = kind.lower() if kind and kind.upper() == "XGMI" else None
        one, other = (keys[a], keys[b]) if keys else (f"GPU{a}", f"GPU{b}")
        yield Link(one, other, kind=fast, hops=_number(hops), weight=_number(weight), said=kind)


def _pair(table: Table, a: str, b: str, where: str) -> str | None:
    one, other = table.get((a, b)), table.get((b, a))
    if one is not None and other is not None and one != other:
        raise _contradiction(a, b, one, other, where)
    return one if one is not None else other


def _contradiction(a: str, b: str, one: str, other: str, where: str) -> UserError:
    why = f"the matrix contradicts itself: GPU{a} to GPU{b} is {one}, GPU{b} to GPU{a} is {other}"
    return refuse(where, why, "", INSTEAD)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _notes(text: str, facts: dict[int, dict[str, str]], numbers: Sequence[int]) -> list[str]:
    notes = []
    differing = [
        n for n, own in facts.items() if len({own.get("numa node"), own.get("numa affinity")} - {None, "-1"}) > 1
    ]
    if differing:
        notes.append(
            f"Numa Node and Numa Affinity differ for GPU {', '.join(map(str, differing))}; the affinity is read"
        )
    asked = any("numa node" in own for own in facts.values())
    nameless = [
        n for n in numbers if asked and "numa node" not in facts.get(n, {}) and "numa affinity" not in facts.get(n, {})
    ]
    if nameless:
        notes.append(f"the text does not tell the memory node of GPU {', '.join(map(str, nameless))}")
    return notes
