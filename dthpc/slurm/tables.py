"""Tables of columns, as `squeue`, `sinfo` and `sacct` print them: separated by `|`, ruled with dashes, or only aligned.

In the aligned forms a cell may be empty or hold blanks, so that the words of a line cannot be dealt out in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from dthpc.errors import UserError
from dthpc.slurm.keyvalues import clean_lines

Row = dict[str, str]


def parse_table(text: str, first_columns: Sequence[str], command: str) -> list[Row]:
    """The rows of a table with a header line.

    Args:
        text: the output; lines before the header are skipped.
        first_columns: names of which a header line holds at least one, so that it is told from a prompt.
        command: what printed it, for messages.

    Raises:
        UserError: there is no header, or a cell cannot be told from its neighbour.
    """
    lines = [line.expandtabs() for line in clean_lines(text)]
    for position, line in enumerate(lines):
        names = set(re.split(r"[|\s]+", line.strip()))
        if names & set(first_columns):
            return _rows(line, [row for row in lines[position + 1 :] if row.strip()], command)
    said = " | ".join(line for line in lines if line)[:300]
    raise UserError(f"holds no header with {' or '.join(first_columns)}", key=command, value=said or "(nothing)")


def separated_rows(text: str, names: Sequence[str], command: str) -> list[Row]:
    """The rows of a headless table separated by `|`, with the names of its columns in order.

    Raises:
        UserError: a line has another number of columns.
    """
    rows = []
    for line in clean_lines(text):
        # With SLURM_CLUSTERS set, a line names the cluster before its jobs.
        if not line.strip() or line.startswith("CLUSTER: "):
            continue
        cells = line.split("|")
        if len(cells) not in (len(names), len(names) + 1):
            raise UserError(f"a line has {len(cells)} columns where {len(names)} were asked", key=command, value=line)
        rows.append({name: cell.strip() for name, cell in zip(names, cells, strict=False)})
    return rows


def _rows(header: str, lines: list[str], command: str) -> list[Row]:
    if "|" in header:
        # sacct's --parsable ends each line with the separator, --parsable2 does not.
        return separated_rows("\n".join(lines), header.strip().rstrip("|").split("|"), command)
    names = header.split()
    if lines and re.fullmatch(r"[- ]+", lines[0]):
        spans = [match.span() for match in re.finditer(r"-+", lines[0])]
        if len(spans) != len(names):
            raise UserError(f"{len(names)} columns over {len(spans)} rules", key=command, value=header)
        return [_ruled_row(line, names, spans, command) for line in lines[1:]]
    if not any(re.search(r"\S\s{2,}\S", line) for line in [header, *lines]):
        # The alignment was lost on the way: only the order of the words is left.
        return [_row_of_words(line, names, command) for line in lines]
    spans = [match.span() for match in re.finditer(r"\S+", header)]
    return [_aligned_row(line, names, spans, command) for line in lines]


def _ruled_row(line: str, names: list[str], spans: list[tuple[int, int]], command: str) -> Row:
    gaps = "".join(line[left:right] for (_, left), (right, _) in pairwise(spans))
    if gaps.strip():
        raise _refusal(line, command)
    return {name: line[start:end].strip() for name, (start, end) in zip(names, spans, strict=True)}


def _row_of_words(line: str, names: list[str], command: str) -> Row:
    words = line.split()
    if len(words) != len(names):
        raise _refusal(line, command)
    return dict(zip(names, words, strict=True))


def _refusal(line: str, command: str) -> UserError:
    return UserError(
        "a cell cannot be told from its neighbours",
        key=command,
        value=line.strip(),
        instead="ask for a form with separators (sacct --parsable2, squeue -o '%i|%T', sinfo -o '%P|%D|%T|%N')",
    )


def _aligned_row(line: str, names: list[str], spans: list[tuple[int, int]], command: str) -> Row:
    words = [(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+", line)]
    columns = [_column(start, end, spans) for _, start, end in words]
    if len(words) == len(names) and all(column in (None, index) for index, column in enumerate(columns)):
        return dict(zip(names, (word for word, _, _ in words), strict=True))
    for position, column in enumerate(columns):
        if column is None:
            columns[position] = _by_neighbours(position, words, columns)
    known = [column for column in columns if column is not None]
    if len(known) < len(columns) or known != sorted(known):
        raise _refusal(line, command)
    cells: dict[str, list[str]] = {name: [] for name in names}
    for (word, _, _), column in zip(words, known, strict=True):
        cells[names[column]].append(word)
    return {name: " ".join(found) for name, found in cells.items()}


def _column(start: int, end: int, spans: list[tuple[int, int]]) -> int | None:
    """The only column whose title a word stands under; the last column has no right border."""
    last_start = spans[-1][0]
    if start >= last_start:
        return len(spans) - 1
    under = [index for index, (left, right) in enumerate(spans) if start < right and end > left]
    return under[0] if len(under) == 1 else None


def _by_neighbours(position: int, words: list[tuple[str, int, int]], columns: list[int | None]) -> int | None:
    """The column of a word under no title: that of a neighbour one blank away, when only one neighbour is so near."""
    near = set()
    for other, gap in (
        (position - 1, words[position][1] - words[position - 1][2] if position else 0),
        (position + 1, words[position + 1][1] - words[position][2] if position + 1 < len(words) else 0),
    ):
        if gap == 1 and columns[other] is not None:
            near.add(columns[other])
    return near.pop() if len(near) == 1 else None
