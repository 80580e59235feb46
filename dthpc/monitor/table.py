"""Tables for people: with `rich` on a terminal, as plain aligned text in a pipe or a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    """Heading."""

    right: bool = False
    """Whether the cells are aligned to the right, as numbers are."""

    fold: bool = False
    """Whether a long cell may be broken over lines on a terminal; others are cut with an ellipsis."""


def is_terminal(out: TextIO) -> bool:
    """Whether `out` is a terminal that understands cursor movements."""
    try:
        return out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:
        return False


def terminal_width(out: TextIO) -> int:
    """Columns of the terminal that `out` is; 80 where it does not tell."""
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def takes_unicode(out: TextIO) -> bool:
    """Whether `out` can show characters beyond ASCII."""
    return "utf" in (getattr(out, "encoding", None) or "").lower()


def print_lines(out: TextIO, text: str) -> None:
    """Write lines, with characters that the encoding of `out` lacks replaced instead of ending in an error."""
    if not takes_unicode(out):
        text = text.translate(_ASCII)
        encoding = getattr(out, "encoding", None) or "ascii"
        text = text.encode(encoding, "replace").decode(encoding)
    out.write(text + "\n")
    out.flush()


def print_table(
    out: TextIO, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """Print a table.

    Args:
        out: where to; its kind decides between `rich` and plain text. `NO_COLOR` is respected.
        columns: headings and alignment; a column whose cells are all empty is left out.
        rows: cells, as many in each row as there are columns.
        styles: a `rich` style for each row's second cell, or nothing.
    """
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    columns = [columns[index] for index in kept]
    rows = [[row[index] for index in kept] for row in rows]
    if is_terminal(out) and takes_unicode(out):
        _print_rich(out, columns, rows, styles)
    else:
        print_lines(out, plain_table(columns, rows))


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The table as aligned text, two spaces between columns, none at the ends of lines."""
    table = [[column.title for column in columns], *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _print_rich(out: TextIO, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    # Imported here: a piped `status` and the follower, which draws its one line itself, never need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else ""
        table.add_row(*(Text(cell, style=style if index == 1 else "") for index, cell in enumerate(row)))
    Console(file=out, highlight=False).print(table)


_ASCII = str.maketrans({"–": "-", "…": "...", "━": "#", "─": "-", "·": "|"})
