"""Lines that stay and one line that changes: the whole of a follower's terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from dthpc.monitor.table import Column, is_terminal, print_lines, print_table, takes_unicode, terminal_width

REDRAW_S = 0.25
"""Fewest seconds between two drawings of the changing line: people read no faster, and the ranks need the cores."""

_CLEAR = "\r\x1b[K"


class Screen:
    """Writes to a terminal or a file; once that is gone (a closed terminal), writing does nothing.

    Drawn by hand instead of by `rich.live`, which costs about a hundred times the CPU time per drawing, and that is
    taken from training on the same cores.
    """

    def __init__(self, out: TextIO) -> None:
        self.terminal = is_terminal(out)
        self.unicode = takes_unicode(out)
        self._out = out
        self._shown = ""
        self._drawn = 0.0

    def line(self, text: str) -> None:
        """Print text that stays."""
        if self._shown:
            self._raw(_CLEAR)
        self._guard(lambda: print_lines(self._out, text))
        if self._shown:
            self._raw(self._shown)

    def status(self, text: str) -> None:
        """Show text in the changing line of a terminal, if it has changed and the last drawing is not too recent."""
        now = time.monotonic()
        if not self.terminal or now - self._drawn < REDRAW_S:
            return
        text = text[: self.width]
        if text != self._shown:
            self._raw(_CLEAR + text)
            self._shown = text
            self._drawn = now

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Print a table that stays."""
        self.clear()
        self._guard(lambda: print_table(self._out, columns, rows))

    def clear(self) -> None:
        """Take the changing line away."""
        if self._shown:
            self._raw(_CLEAR)
            self._shown = ""

    @property
    def width(self) -> int:
        """Columns that the changing line may take: one less than there are, so that it never wraps."""
        return max(1, terminal_width(self._out) - 1)

    def _raw(self, text: str) -> None:
        def write() -> None:
            self._out.write(text)
            self._out.flush()

        self._guard(write)

    def _guard(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError):
            # The terminal was closed or the pipe broke: whoever follows a local run still has to see it saved.
            self.terminal = False
