"""One line of a matrix of devices as its cells, whatever became of the tabs between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = r"PIX|PXB|PHB|NODE|SYS|SOC|NV\d+|NV#|HCCS(?:_SW)?|SIO|PIB|XGMI|C2C"
"""Words between two devices."""

PEER = r"OK|CNS|TNS|GNS|NS|DR|CNT|U"
"""Words of the matrices of peer-to-peer abilities (`topo -p2p`), which tell no distance."""

LABELS = ("CPU_AFFINITY", "NUMA_AFFINITY", "GPU_NUMA_ID")
ACCELERATOR = r"(?:GPU|NPU|DCU)\d+"

_PHRASES = [
    (re.compile(r"CPU[ \t_]*Affinity", re.I), "CPU_AFFINITY"),
    (re.compile(r"NUMA[ \t_]*Affinity", re.I), "NUMA_AFFINITY"),
    (re.compile(r"GPU[ \t_]*NUMA[ \t_]*ID", re.I), "GPU_NUMA_ID"),
]
# A comment sign, a quotation sign, the name of a host or of a rank, or a time, before what the tool wrote.
_PREFIX = re.compile(
    r"\s*(?:[#>*;%]+|//+|\[[^\]\t]*\](?:<\w+>)?:?|\d{4}-\d\d-\d\d[T ][\d:.,+Z]+:?|\d+:(?=\s)"
    r"|(?!NIC\d|GPU\d)[A-Za-z][\w.-]*:(?=\s))\s?"
)
_GLUE = re.compile(rf"X|{LEVEL}|{ACCELERATOR}|NIC\d+|mlx\d+_(?:bond_|ib)?\d+|{'|'.join(LABELS)}")
_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*,?")
_ABSENT = re.compile(r"N/A|n/a|-|None|null")


class Glued(str):
    """A word that stood with another without anything between, so that where it begins or ends is not certain."""

    __slots__ = ()


@dataclass(frozen=True)
class Line:
    """The cells of one line; an empty text is an empty cell, which only tabs and table rules can show."""

    words: tuple[str, ...]
    starts: tuple[int, ...]
    """Column of each word; all 0 where tabs tell the cells apart."""

    ruled: bool
    """Whether tabs (or the rules of a table) separate the cells, so that empty ones show."""

    table: bool
    """Whether the line is a row of a table with rules, where each cell stands under its header."""

    text: str


def is_level(word: str) -> bool:
    """Whether a word tells how two devices are connected, or marks the diagonal: `PIX`, `NV12`, `X`."""
    return word == "X" or re.fullmatch(LEVEL, word) is not None


def is_peer(word: str) -> bool:
    """Whether a word stands in a matrix of peer-to-peer abilities, such as `OK` or `CNS`."""
    return re.fullmatch(PEER, word) is not None


def is_list(word: str) -> bool:
    """Whether a word is a list of numbers: `0-15,32`."""
    return _LIST.fullmatch(word) is not None


def is_absent(word: str) -> bool:
    """Whether a cell tells nothing: it is empty, or says so."""
    return word == "" or _ABSENT.fullmatch(word) is not None


def is_device(word: str) -> bool:
    """Whether a word may name a device in a header: `GPU0`, `NIC3`, `mlx5_bond_0`, `rocep177s0f0`."""
    if is_level(word) or word in LABELS or is_list(word):
        return False
    return re.fullmatch(r"[A-Za-z][\w.-]*\d[\w.-]*", word) is not None


def strip_prefix(text: str) -> str:
    """The line without what a log, a comment or a quotation put before it."""
    while True:
        match = _PREFIX.match(text)
        rest = text[match.end() :] if match else ""
        # Without a device behind it, what looks like a prefix is the text itself.
        if not match or not re.search(r"GPU|NPU|DCU|NIC|mlx|\b(?:PIX|PXB|PHB|NODE|SYS|SOC|NV\d+)\b", rest):
            return text
        text = rest


def split(text: str) -> Line:
    """The cells of one line."""
    text = re.sub(r"(?:\s*\|)+\s*$", "", text) if not text.lstrip().startswith("|") else text
    text = text.replace("│", "|").replace("┃", "|").replace("\\_", "_").replace("`", "")
    table = text.count("|") >= 2
    if table:
        text = text.strip()
        # Without a rule at the end, one at the start stands behind an empty first cell.
        inner = text[1:-1] if text.startswith("|") and text.endswith("|") else text
        text = "\t".join(cell.strip() for cell in inner.split("|"))
    for phrase, label in _PHRASES:
        text = phrase.sub(label, text)
    if "\t" in text:
        words = [word for cell in text.split("\t") for word in (_unglued(cell.split()) or [""])]
        return Line(tuple(words), (0,) * len(words), True, table, text)
    found = [(word, match.start()) for match in re.finditer(r"\S+", text) for word in _unglued([match.group()])]
    return Line(tuple(word for word, _ in found), tuple(start for _, start in found), False, table, text)


def _unglued(words: list[str]) -> list[str]:
    """The words, those that ran into each other separated where that can be done in one way only."""
    parted: list[str] = []
    for word in words:
        if parted and parted[-1].endswith(",") and is_list(parted[-1]) and is_list(word):
            parted[-1] += word
        else:
            parted += _part(word)
    return parted


def _part(word: str) -> list[str]:
    if is_level(word) or is_list(word) or is_absent(word) or word in LABELS:
        return [word]
    pieces: list[str] = []
    at = 0
    while match := _GLUE.match(word, at):
        pieces.append(match.group())
        at = match.end()
    rest = word[at:]
    listed = re.fullmatch(r"([\d,-]*\d)?(N/A)?", rest)
    # Digits after digits could belong to either side: NV1|2-15 or NV12|-15.
    certain = not rest or (listed and (not listed[1] or not pieces or not pieces[-1][-1].isdigit()))
    if not certain or len(pieces) + bool(rest) < 1 or (not pieces and not (listed and listed[1] and listed[2])):
        return [word]
    if len(pieces) == 1 and not rest:
        return [word]
    return pieces + [Glued(part) for part in (listed.groups() if listed and rest else ()) if part]


def by_tab_stops(words: list[str], starts: list[int], line: Line, columns: int) -> list[str] | None:
    """The fields behind the last cell, where the columns of the words show that tabs of 8 became blanks.

    Returns None where the row was laid out in another way.
    """
    indent = len(line.text) - len(line.text.lstrip())
    at = indent + 8 * columns
    if starts[0] not in (at, at + 1):
        return None
    by_column = dict(zip(starts[1:], words, strict=True))
    at += 8
    values: list[str] = []
    while by_column:
        word = by_column.pop(at, "")
        values.append(word)
        at = indent + ((at - indent + len(word)) // 8 + 1) * 8
        if by_column and at > max(by_column):
            return None
    return values


def by_header(words: list[str], starts: list[int], header: Line | None, labels: Sequence[str]) -> list[str] | None:
    """The words under the labels that begin in the same column, if all do."""
    if header is None or header.ruled:
        return None
    columns = dict(zip(header.words, header.starts, strict=True))
    places = {columns[label]: place for place, label in enumerate(labels)}
    values = [""] * len(labels)
    for word, start in zip(words, starts, strict=True):
        if start not in places:
            return None
        values[places[start]] = word
    return values
