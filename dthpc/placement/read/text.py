"""What all readers of text share: cleaning what terminals, logs and web pages did to it, and refusing."""

from __future__ import annotations

import re

from dthpc.errors import UserError

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_()][0-9A-B]?")
_DASHES = dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-")
"""What word processors and web pages make of a hyphen."""

_BLANK_LIKE = {"\u00a0": " ", "\u2007": " ", "\u202f": " ", "\ufeff": "", "\u200b": ""}
_OTHER_BREAKS = dict.fromkeys("\v\f\x85\u2028\u2029", "\n")
_LONG_GAP = re.compile(r"(?<![ \t])([ \t]{200})[ \t]+")
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){3,}")
_FOUR_BIT_COLOUR = re.compile(r"\[(?:\d{1,3}(?:;\d{1,3})*)?m")

LONGEST = 32_768
"""Characters of a line; the longest that tools print are tables of some thousand."""


def clean(text: str) -> str:
    """The text without colour codes, carriage returns and odd blanks; the columns of what remains are as shown.

    Codes that lost their escape character (`[4mGPU0[0m`, as copied from some pagers) go too.
    """
    text = _FOUR_BIT_COLOUR.sub("", _ESCAPE.sub("", text))
    for odd, plain in {**_BLANK_LIKE, **_OTHER_BREAKS, **_DASHES}.items():
        text = text.replace(odd, plain)
    text = re.sub(r"\r+\n?", "\n", text.replace("\r\n", "\n"))
    # Rules that skip blanks would try every beginning and end of a gap without end.
    return _EMPTY_LINES.sub("\n\n\n", _LONG_GAP.sub(r"\1", text))


def without_endless_lines(text: str) -> str:
    """The text without lines beyond `LONGEST`, as of data in a log, which rules would take long over."""
    if len(text) <= LONGEST:
        return text
    return "\n".join(line if len(line) <= LONGEST else "" for line in text.split("\n"))


def refuse(where: str, why: str, read: str, instead: str) -> UserError:
    """The error for a text that cannot be read without guessing.

    Args:
        where: the file or command that the text is from.
        why: what is wrong.
        read: the words or the line at fault, as read.
        instead: what to do.
    """
    shown = read.strip()
    return UserError(f"{why} (read: {shown[:160]!r})" if shown else why, key=where, instead=instead)
