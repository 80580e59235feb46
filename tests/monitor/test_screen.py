from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from typing import TextIO

import pytest

from dthpc.monitor import screen
from dthpc.monitor.screen import Screen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A terminal: the file that a program writes to, and the descriptor on which it is seen."""
    monkeypatch.setenv("TERM", "xterm")
    main, side = pty.openpty()
    with open(side, "w", encoding="utf-8") as out:
        yield out, main
    os.close(main)


def assert_shown(seen: int, expected: bytes) -> None:
    """A terminal hands over what was written in pieces of its own choice."""
    shown = b""
    while len(shown) < len(expected):
        shown += os.read(seen, 4096)
    assert shown == expected


def test_lines_stay_above_the_changing_one(terminal: tuple[TextIO, int]) -> None:
    out, seen = terminal
    shown = Screen(out)
    shown.status("step 1")
    shown.line("saved")
    shown.clear()
    assert_shown(seen, b"\r\x1b[Kstep 1\r\x1b[Ksaved\r\nstep 1\r\x1b[K")


def test_the_changing_line_is_drawn_only_when_it_changes_and_not_too_often(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = terminal
    now = [100.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    shown = Screen(out)
    for moment, text in ((100.0, "a"), (100.1, "b"), (100.3, "b"), (101.0, "b")):
        now[0] = moment
        shown.status(text)
    assert_shown(seen, b"\r\x1b[Ka\r\x1b[Kb")


def test_a_file_gets_no_changing_line() -> None:
    out = io.StringIO()
    shown = Screen(out)
    shown.status("step 1")
    shown.line("saved")
    shown.clear()
    assert out.getvalue() == "saved\n"


def test_a_terminal_that_goes_away_is_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as out:
        shown = Screen(out)
        shown.line("into the void")
        shown.line("and again")
        with pytest.raises(BrokenPipeError):
            out.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
