"""Matrices of devices by devices, as `nvidia-smi topo -m` prints them, out of any text around them.

A matrix is read from its own redundancy: the header counts the cells of a row, `X` stands on the diagonal, and each
pair is told twice. What these leave open is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from dthpc.errors import UserError
from dthpc.placement.read.cells import (
    ACCELERATOR,
    LABELS,
    Glued,
    Line,
    by_header,
    by_tab_stops,
    is_absent,
    is_device,
    is_level,
    is_list,
    is_peer,
    split,
    strip_prefix,
)
from dthpc.placement.read.text import refuse

INSTEAD = "save the output itself (`nvidia-smi topo -m > topo.txt`), with its tabs and whole lines"

_RULE = re.compile(r"[^|+]*[|+]?[-=+:|_ ]*-{3}[-=+:|_ ]*")
"""A line that only parts others, perhaps behind a prefix."""


@dataclass
class Row:
    """The row of one device."""

    name: str
    cells: list[str | None]
    """One for each column, in order; None for an empty one."""

    tail: dict[str, str]
    """What stands under the labels (`LABELS`); absent values are left out."""

    whole: bool = True
    width: int = 0
    """Number of words behind the cells, absent ones (N/A) among them."""


@dataclass
class Matrix:
    """One matrix as it stands in the text."""

    first_line: int
    """Where its header stands, counted from 0."""

    columns: list[str]
    labels: list[str]
    rows: dict[str, Row] = field(default_factory=dict)
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    last_line: int = 0

    @property
    def tells_levels(self) -> bool:
        return any(
            cell is not None and cell != "X" and is_level(cell) for row in self.rows.values() for cell in row.cells
        )

    def cell(self, a: str, b: str) -> str | None:
        """What the matrix says of a pair; either triangle."""
        for one, other in ((a, b), (b, a)):
            row = self.rows.get(one)
            if row is not None and other in self.columns:
                place = self.columns.index(other)
                if place < len(row.cells) and row.cells[place] is not None:
                    return row.cells[place]
        return None


@dataclass
class _Block:
    """A header and the lines of each row below it, not yet told apart into cells."""

    first_line: int
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    last_line: int = 0
    ends_text: bool = False


def read_matrices(text: str, where: str) -> list[Matrix]:
    """Every matrix of a cleaned text, in order, with those of peer-to-peer abilities among them.

    Raises:
        UserError: a matrix cannot be read without guessing.
    """
    lines = [strip_prefix(line) for line in text.split("\n")]
    return [_Reader(block, where).read() for block in _blocks(lines) if block.rows]


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    block: _Block | None = None
    for number, line in enumerate(lines):
        words = [word for word in split(line).words if word]
        if not words or _RULE.fullmatch(line):
            continue
        if block is not None and block.rows and len(words) > 1 and _is_header(words):
            yield block
            block = _Block(number, [line])
        elif block is not None and _starts_row(words):
            block.rows.append([line])
        elif block is not None and block.rows and _goes_on(words):
            block.rows[-1].append(line)
        elif block is not None and not block.rows and _continues_header(words):
            block.header.append(line)
        elif _is_header(words):
            if block is not None:
                yield block
            block = _Block(number, [line])
        elif block is None and _starts_row(words) and re.fullmatch(ACCELERATOR, words[0]):
            # The header is lost: the names of the rows may do for it.
            block = _Block(number, [], [[line]])
        elif block is not None:
            yield block
            block = None
        if block is not None:
            block.last_line = number
    if block is not None:
        block.ends_text = True
        yield block


def _is_header(words: Sequence[str]) -> bool:
    rest = [word for word in words if word not in LABELS]
    named = [word for word in rest if is_device(word)]
    return (
        bool(named)
        and re.fullmatch(ACCELERATOR, named[0]) is not None
        and all(map(_in_header, rest[:-1]))
        and _piece(rest[-1])
    )


def _in_header(word: str) -> bool:
    # Pieces of labels stand where a header was wrapped or cut between their words.
    return is_device(word) or word in ("CPU", "Affinity", "NUMA", "GPU", "ID", *LABELS)


def _piece(word: str) -> bool:
    """Whether a word can be a piece of a name or of a label, at the end of a line that was broken within it."""
    return re.fullmatch(r"[\w.-]+", word) is not None


def _continues_header(words: Sequence[str]) -> bool:
    return _piece(words[0]) and _piece(words[-1]) and all(map(_in_header, words[1:-1]))


def _starts_row(words: Sequence[str]) -> bool:
    """Whether a line begins with the name of a device and goes on with cells."""
    names = [place for place, word in enumerate(words) if is_device(word)]
    if not names or not all(is_list(word) or is_absent(word) for word in words[: names[0]]):
        return False
    rest = words[names[0] + 1 :]
    if not rest:
        return re.fullmatch(ACCELERATOR, words[0]) is not None
    return is_level(rest[0]) or is_peer(rest[0]) or is_absent(rest[0])


def _goes_on(words: Sequence[str]) -> bool:
    """Whether a line can be the rest of a row that was wrapped: cells, lists, numbers, or pieces of them."""
    return all(
        is_level(word) or is_list(word) or is_absent(word) or re.fullmatch(r"[A-Z]{1,3}\d*|[-,\d]+|/A|A", word)
        for word in words
    )


class _Reader:
    """Reads one block."""

    def __init__(self, block: _Block, where: str) -> None:
        self.block = block
        self.where = where

    def read(self) -> Matrix:
        header = self._header()
        words = [word for word in header.words if word] if header else []
        columns = [word for word in words if word not in LABELS and is_device(word)]
        labels = [word for word in words if word in LABELS]
        self.matrix = Matrix(self.block.first_line, columns, labels, last_line=self.block.last_line)
        self._cut_label(words)
        if not columns:
            self._columns_from_rows()
        if len(set(self.matrix.columns)) < len(self.matrix.columns):
            raise self._refusal("a device stands twice in the header", " ".join(self.matrix.columns))
        for number, lines in enumerate(self.block.rows):
            row = self._row(lines, header, number == len(self.block.rows) - 1)
            if row.tail and not self.matrix.complete and self._ends_with_header(lines):
                # Cut at one width as the header is: the last value may be cut too, as 0-51,104 of 0-51,104-155.
                row.tail.popitem()
            self._add(row)
        self._check_rows()
        return self.matrix

    def _ends_with_header(self, lines: Sequence[str]) -> bool:
        if len(lines) != 1 or len(self.block.header) != 1:
            return False
        header, line = self.block.header[0], lines[0]
        return len(line) == len(header) or len(line.expandtabs()) == len(header.expandtabs())

    def _header(self) -> Line | None:
        """The header's cells, its lines put together again."""
        lines = self.block.header
        if not lines:
            return None
        for joints in product((" ", ""), repeat=len(lines) - 1):
            line = split("".join(part + joint for part, joint in zip(lines, (*joints, ""), strict=True)))
            devices = [word for word in line.words if word and word not in LABELS]
            if all(is_device(word) for word in devices) and _counts_up(devices):
                return line
        return split(" ".join(lines))

    def _cut_label(self, words: Sequence[str]) -> None:
        """A header that ends within a label is cut; what the begun label says is still plain."""
        rest = " ".join(word for word in words if word not in LABELS and not is_device(word))
        if not rest:
            return
        following = next(label for label in (*LABELS, "") if label not in self.matrix.labels)
        if rest and following.lower().replace("_", " ").startswith(rest.lower()):
            self.matrix.labels.append(following)
            self.matrix.complete = False
            self.matrix.notes.append(f"the header is cut after {rest!r}")
        else:
            raise self._refusal("the header cannot be told apart into devices", rest)

    def _columns_from_rows(self) -> None:
        names = [_name_of(split(lines[0])) for lines in self.block.rows]
        cells = {len([w for line in lines for w in split(line).words if is_level(w)]) for lines in self.block.rows}
        if cells != {len(names)} or not _counts_up(names):
            raise self._refusal("the matrix has no header that names its columns", self.block.rows[0][0])
        self.matrix.columns = names
        self.matrix.complete = False
        self.matrix.notes.append(
            "the header is missing; the columns are named as the rows are, and affinities are not read"
        )

    def _row(self, lines: list[str], header: Line | None, last: bool) -> Row:
        if len(lines) == 1:
            line = split(lines[0])
            if line.table and header is not None and header.table and len(line.words) == len(header.words):
                return self._row_of_table(line, header)
            return self._row_of_line(line, header, last)
        return self._row_of_lines(lines, header, last)

    def _row_of_lines(self, lines: list[str], header: Line | None, last: bool) -> Row:
        """A wrapped row: the ways of joining its lines that give a whole row must agree."""
        ways: list[Row] = []
        for joints in product((" ", ""), repeat=len(lines) - 1):
            glue = [_joint(joint, part, after) for joint, part, after in zip(joints, lines, lines[1:], strict=False)]
            line = split("".join(part + joint for part, joint in zip(lines, (*glue, ""), strict=True)))
            try:
                row = self._row_of_line(line, header, False)
            except UserError:
                continue
            if row not in ways:
                ways.append(row)
        if len(ways) == 1:
            return ways[0]
        if not ways and last:
            return self._row_of_line(split(" ".join(lines)), header, last)
        why = "a wrapped row can be put together in several ways" if ways else "a wrapped row does not fit the header"
        raise self._refusal(why, " / ".join(lines))

    def _row_of_table(self, line: Line, header: Line) -> Row:
        pairs = list(zip(header.words, line.words, strict=True))
        name = next((word for title, word in pairs if title == "" and is_device(word)), None) or _name_of(line)
        cells = [None if is_absent(word) else word for title, word in pairs if title in self.matrix.columns]
        tail = {title: word for title, word in pairs if title in self.matrix.labels and not is_absent(word)}
        wrong = [cell for cell in cells if cell is not None and not is_level(cell) and not is_peer(cell)]
        if wrong:
            raise self._refusal(f"{wrong[0]!r} is no distance between two devices", line.text)
        return Row(name, cells, tail)

    def _row_of_line(self, line: Line, header: Line | None, last: bool) -> Row:
        name = _name_of(line)
        words = list(line.words)[line.words.index(name) + 1 :]
        starts = list(line.starts)[line.words.index(name) + 1 :]
        wanted = len(self.matrix.columns)
        have = 0
        while have < min(wanted, len(words)) and _is_cell(words[have], line.ruled):
            have += 1
        if not line.ruled:
            extra = [word for word in words[have:] if is_level(word)]
            if have == wanted and extra:
                raise self._refusal(f"the row of {name} has more cells than the header has devices", line.text)
        cells = [None if is_absent(word) else word for word in words[:have]]
        if have < wanted:
            return self._short_row(name, cells, words[have:], line, last)
        tail, whole = self._tail(words[have:], starts[have - 1 :], line, header, last)
        return Row(name, cells, tail, whole, sum(bool(word) for word in words[have:]))

    def _short_row(self, name: str, cells: list[str | None], rest: list[str], line: Line, last: bool) -> Row:
        if last and (not rest or (len(rest) == 1 and self._begins_level(rest[0]))):
            # The text was cut within this row. Its last cell may be cut too, as NV1 of NV12.
            cut = cells[-1] if cells and not rest and re.fullmatch(r"NV\d+", cells[-1] or "") else None
            self.matrix.complete = False
            self.matrix.notes.append(f"the text is cut within the row of {name}")
            return Row(name, cells[:-1] if cut else cells, {}, whole=False)
        wanted = len(self.matrix.columns)
        if not rest and all(cell is None or is_level(cell) for cell in cells):
            return Row(name, list(cells), {}, whole=False)
        told = f"{len(cells)} cells" + (f", then {rest[0]!r}," if rest else "")
        raise self._refusal(f"the row of {name} has {told} where the header has {wanted} devices", line.text)

    @staticmethod
    def _begins_level(word: str) -> bool:
        return any(level.startswith(word) for level in ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "NV"))

    def _tail(
        self, words: list[str], starts: list[int], line: Line, header: Line | None, last: bool
    ) -> tuple[dict[str, str], bool]:
        """What stands under the labels, and whether all of it is there.

        Args:
            words: the words behind the last cell.
            starts: the columns of the last cell and of these words.
        """
        labels = self.matrix.labels
        if not labels:
            if any(not is_absent(word) for word in words):
                self.matrix.complete = False
                self._note("what stands behind the distances has no header, and is not read")
            return {}, True
        wrong = [word for word in words if not is_list(word) and not is_absent(word)]
        if wrong and not (last and self.block.ends_text and wrong == words[-1:]):
            raise self._refusal(f"{wrong[0]!r} is neither a list of CPUs nor a number of a memory node", line.text)
        words = [word for word in words if word not in wrong]
        if line.ruled:
            # The tool writes an empty cell more before the last label.
            third = next((word for word in words[2:] if word), "")
            values = [*words[:2], third][: len(labels)] if len(labels) > 2 else words[: len(labels)]
            spare = words[len(labels) :] if len(labels) < 3 else [w for w in words[2:] if w][1:]
            if any(not is_absent(word) for word in spare):
                raise self._refusal("the row has more values than the header has labels", line.text)
        elif len(words) == len(labels):
            values = words
        elif len(words) > len(labels):
            raise self._refusal("the row has more values than the header has labels", line.text)
        else:
            values = self._spread(words, starts, line, header)
        found = {label: value for label, value in zip(labels, values, strict=False) if not is_absent(value)}
        return found, not wrong

    def _spread(self, words: list[str], starts: list[int], line: Line, header: Line | None) -> list[str]:
        """Fewer words than labels: find the empty places by where the words stand."""
        labels = self.matrix.labels
        if any(isinstance(word, Glued) for word in words):
            raise self._refusal("values run into each other, so that their borders are not certain", line.text)
        if all(is_absent(word) for word in words):
            return [""] * len(labels)
        stops = by_tab_stops(words, starts, line, len(self.matrix.columns))
        if stops is not None:
            values = [*stops[:2], next((word for word in stops[2:] if word), "")]
            if len(labels) > 2 or not any(stops[len(labels) :]):
                return values[: len(labels)]
        under = by_header(words, starts[1:], header, labels) if self._stands_under(line, header) else None
        if under is not None:
            return under
        raise self._refusal("an empty place among the affinities cannot be told apart from the values", line.text)

    def _stands_under(self, line: Line, header: Line | None) -> bool:
        """Whether the cells of a row stand in the columns of the header: else a word under a label is chance."""
        if header is None:
            return False
        first = line.words.index(_name_of(line)) + 1
        columns = dict(zip(header.words, header.starts, strict=True))
        cells = zip(self.matrix.columns, line.starts[first:], strict=False)
        return all(column in columns and abs(columns[column] - start) <= 1 for column, start in cells)

    def _add(self, row: Row) -> None:
        if row.name in self.matrix.rows:
            if self.matrix.rows[row.name] == row:
                return
            raise self._refusal(f"{row.name} has two rows that differ", row.name)
        self.matrix.rows[row.name] = row

    def _check_rows(self) -> None:
        matrix = self.matrix
        for row in matrix.rows.values():
            if row.name in matrix.columns:
                own = matrix.columns.index(row.name)
                misplaced = [
                    matrix.columns[place] for place, cell in enumerate(row.cells) if cell == "X" and place != own
                ]
                if misplaced or (own < len(row.cells) and row.cells[own] not in ("X", None)):
                    raise self._refusal(
                        f"the row of {row.name} is shifted: its X is not in its own column", str(row.cells)
                    )
            elif re.fullmatch(ACCELERATOR, row.name):
                raise self._refusal(f"the row of {row.name} has no column", row.name)
        for row in matrix.rows.values():
            self._check_pairs(row)
        self._columns_cut_off()
        for row in matrix.rows.values():
            if len(row.cells) < len(matrix.columns):
                row.cells += [None] * (len(matrix.columns) - len(row.cells))
        self._check_end()
        lost = [name for name in matrix.columns if name not in matrix.rows and re.fullmatch(ACCELERATOR, name)]
        if lost:
            matrix.complete = False
            self._note(f"the rows of {', '.join(lost)} are missing")

    def _columns_cut_off(self) -> None:
        """A cut header lacks its last devices; their own rows still tell of the others."""
        further = [name for name in self.matrix.rows if name not in self.matrix.columns]
        if further:
            self.matrix.columns += further
            self.matrix.complete = False
            self._note(f"the header is cut: {', '.join(further)} and what follows are not in it")

    def _check_end(self) -> None:
        """A text that ends within the affinities of its last row: the last value may be cut, as 4 of 47."""
        rows = [row for row in self.matrix.rows.values() if re.fullmatch(ACCELERATOR, row.name)]
        if not rows or not self.block.ends_text or list(self.matrix.rows.values())[-1] is not rows[-1]:
            return
        # The first of several rows has no others to tell how long it should be.
        alone = len(rows) == 1 and any(
            re.fullmatch(ACCELERATOR, name) and name not in self.matrix.rows for name in self.matrix.columns
        )
        last, usual = rows[-1], min((row.width for row in rows[:-1] if row.whole), default=0)
        if alone or last.width < usual or not last.whole:
            if last.tail and last.whole:
                last.tail.popitem()
            self.matrix.complete = False
            self._note(f"the text is cut within the row of {last.name}")

    def _check_pairs(self, row: Row) -> None:
        for other, cell in zip(self.matrix.columns, row.cells, strict=False):
            mirror = self.matrix.rows.get(other)
            if mirror is None or row.name not in self.matrix.columns or cell is None:
                continue
            place = self.matrix.columns.index(row.name)
            back = mirror.cells[place] if place < len(mirror.cells) else None
            if back is not None and back != cell:
                raise self._refusal(
                    f"the matrix contradicts itself: {row.name} to {other} is {cell}, {other} to {row.name} is {back}",
                    " ".join(str(each) for each in row.cells),
                )

    def _note(self, note: str) -> None:
        if note not in self.matrix.notes:
            self.matrix.notes.append(note)

    def _refusal(self, why: str, read: str) -> UserError:
        return refuse(self.where, why, read, INSTEAD)


def _is_cell(word: str, ruled: bool) -> bool:
    return is_level(word) or is_peer(word) or (ruled and word == "") or word == "N/A"


def _name_of(line: Line) -> str:
    return next(word for word in line.words if is_device(word))


def _joint(joint: str, part: str, after: str) -> str:
    """What to put where a line was broken; a tab where the row has tabs and none stands at the break."""
    if joint and "\t" in part + after:
        return "" if part.endswith("\t") or after.startswith("\t") else "\t"
    return joint


def _counts_up(names: Sequence[str]) -> bool:
    """Whether the numbered devices (GPU0, GPU1, … NIC0, …) each count up one by one."""
    for kind in ("GPU", "NIC"):
        numbers = [int(name[3:]) for name in names if re.fullmatch(kind + r"\d+", name)]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False:
            return False
    return True
