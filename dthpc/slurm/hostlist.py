"""Slurm's host lists (`n[01-03,7],login`) and per-node counts (`2(x3),1`), read without Slurm.

`scontrol show hostnames` needs a readable slurm.conf, which containers and offline machines lack. The rules here are
those of Slurm's `hostlist.c`: order and duplicates are kept (with `--distribution=arbitrary` one entry stands for one
task), the low bound of a range sets the width of its numbers, the first bracket varies slowest. Two things go beyond
22.05: a suffix after a bracket, which newer versions take, and a refusal of what Slurm would quietly read as something
else (`a[1, 2]` is `a1,a02` to it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from dthpc.errors import UserError

MAX_RANGE = 262_144
"""Most hosts of one element; Slurm's own bound on the ranges of one bracket."""

MAX_HOSTS = 4_194_304
"""Most hosts of a whole list."""

_SEPARATORS = ", \t\n"
_LITERAL = re.compile(r"[A-Za-z0-9_.:%+-]*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_TAIL_NUMBER = re.compile(r"(.*?)([0-9]{1,18})", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class _Span:
    """One `low-high` of a bracket."""

    low: int
    high: int
    width: int

    def __len__(self) -> int:
        return self.high - self.low + 1

    def numbers(self) -> Iterable[str]:
        return (f"{number:0{self.width}d}" for number in range(self.low, self.high + 1))


_Part = Sequence[_Span] | str


def expand(text: str) -> list[str]:
    """Every host name of a host list, in its order, duplicates kept.

    Raises:
        UserError: the text is no host list; the message says what is wrong and at which character (counted from 1).
    """
    names: list[str] = []
    for start, element in _elements(text):
        parts = _parse_element(text, start, element)
        size = prod(sum(map(len, part)) for part in parts if not isinstance(part, str))
        if size > MAX_RANGE or len(names) + size > MAX_HOSTS:
            raise _refusal(text, start, f"{element!r} stands for {size:,} hosts, more than any cluster has")
        choices = ([part] if isinstance(part, str) else [n for span in part for n in span.numbers()] for part in parts)
        names.extend("".join(words) for words in product(*choices))
    return names


def compress(names: Iterable[str]) -> str:
    """A short host list of the names; `expand` gives the same names in the same order, duplicates included."""
    groups: list[tuple[str, list[_Span]]] = []
    for name in names:
        if not name or not _LITERAL.fullmatch(name):
            raise UserError("is no host name", key="host name", value=name)
        match = _TAIL_NUMBER.fullmatch(name)
        prefix, digits = match.groups() if match else (name, "")
        span = _Span(int(digits or 0), int(digits or 0), len(digits))
        if not digits or not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [span] if digits else []))
        else:
            _append(groups[-1][1], span)
    return ",".join(_write(prefix, spans) for prefix, spans in groups)


def expand_tasks_per_node(text: str) -> list[int]:
    """The counts of `SLURM_TASKS_PER_NODE` and `SLURM_JOB_CPUS_PER_NODE`, one a node: `2(x3),1` is [2, 2, 2, 1].

    Raises:
        UserError: the text has another form, a count of nought, or stands for more nodes than any cluster has.
    """
    counts: list[int] = []
    for word in text.strip().split(","):
        match = _COUNT.fullmatch(word.strip())
        count, repeat = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if count < 1 or repeat < 1 or len(counts) + repeat > MAX_HOSTS:
            raise UserError(
                f"{word!r} is not a count of tasks",
                key="tasks per node",
                value=repr(text),
                instead="write counts as Slurm does, such as 4, or 2(x3),1 for three nodes with 2 and one with 1",
            )
        counts.extend([count] * repeat)
    return counts


def _elements(text: str) -> Iterable[tuple[int, str]]:
    """The elements between separators that are outside brackets, with where each starts; empty ones are skipped."""
    start = depth = 0
    for position, char in enumerate(text):
        if char == "[":
            if depth:
                raise _refusal(text, position, "a bracket inside a bracket")
            depth, opened = 1, position
        elif char == "]":
            if not depth:
                raise _refusal(text, position, "a closing bracket without an opening one")
            depth = 0
        elif not depth and char in _SEPARATORS:
            if position > start:
                yield start, text[start:position]
            start = position + 1
    if depth:
        raise _refusal(text, opened, "a bracket that is never closed")
    if start < len(text):
        yield start, text[start:]


def _parse_element(text: str, start: int, element: str) -> list[_Part]:
    """An element as literal text and brackets in turn."""
    parts: list[_Part] = []
    # Brackets are balanced and flat here, so that every odd piece is the inside of one.
    for index, piece in enumerate(re.split(r"[\[\]]", element)):
        if index % 2:
            parts.append(_parse_bracket(text, start, piece))
        else:
            end = _LITERAL.match(piece)
            if end is None or end.end() < len(piece):
                at = 0 if end is None else end.end()
                raise _refusal(text, start + at, f"{piece[at]!r} cannot be part of a host name")
            parts.append(piece)
        start += len(piece) + 1
    return parts


def _parse_bracket(text: str, start: int, inside: str) -> list[_Span]:
    spans = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise _refusal(text, start, _why_no_range(word))
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise _refusal(text, start, f"the range {word!r} runs backwards")
        if high - low >= MAX_RANGE:
            raise _refusal(text, start, f"the range {word!r} holds more than {MAX_RANGE:,} hosts")
        spans.append(_Span(low, high, len(match[1])))
        start += len(word) + 1
    return spans


def _why_no_range(word: str) -> str:
    if not word:
        return "an empty place in a bracket"
    if word != word.strip() or re.search(r"\s", word):
        return f"a blank inside a bracket ({word!r})"
    if word.endswith("-"):
        return f"the range {word!r} has no end"
    if word.startswith("-"):
        return f"the range {word!r} has no start, and numbers of hosts are never negative"
    return f"{word!r} is neither a number nor a range of numbers"


def _refusal(text: str, position: int, why: str) -> UserError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return UserError(
        f"{why}, at character {position + 1}",
        key="host list",
        value=repr(shown),
        instead="write it as Slurm does, such as node[01-04,7],login1",
    )


def _append(spans: list[_Span], span: _Span) -> None:
    """Let the last range grow by one number where the text allows it, else start another."""
    last = spans[-1]
    follows = span.low == last.high + 1 and len(last) < MAX_RANGE
    # The number must come out with the width that the range's low bound gives it.
    if follows and len(f"{span.low:0{last.width}d}") == span.width:
        spans[-1] = _Span(last.low, span.low, last.width)
    else:
        spans.append(span)


def _write(prefix: str, spans: list[_Span]) -> str:
    words = [f"{s.low:0{s.width}d}" + (f"-{s.high:0{s.width}d}" if len(s) > 1 else "") for s in spans]
    if not words:
        return prefix
    return f"{prefix}{words[0]}" if len(spans) == 1 and len(spans[0]) == 1 else f"{prefix}[{','.join(words)}]"
