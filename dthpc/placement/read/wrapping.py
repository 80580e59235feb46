"""Taking off what logs, launchers, mails and web pages put around a text: labels of lines, quotes, fences, HTML.

Only what stands on every line is taken for a label, so that nothing of the text itself can go.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence

from dthpc.placement.read.text import clean

_LABELS = [
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s:\[]+(?:\[\d+\])?: ?"),  # syslog, journalctl
    re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: -)? ?"),
    re.compile(r"\[\d+,\d+\]<std(?:out|err)>: ?"),  # mpirun --tag-output
    re.compile(r"(?:>|#|//|\|)(?: |(?=\t)|$)"),  # quotes and comments
]
_NAME = re.compile(r"[ ]*(\[?[A-Za-z0-9][\w.-]*\]?):(?: |(?=\t)|$)", re.ASCII)
"""Label of `pdsh`, `clush` and `srun --label`: a host or a number of a task."""

_DEPTH = 4
_PAGE = re.compile(r"\s*<(?:!doctype html|html|pre|code|div|p|samp)\b", re.IGNORECASE)
_TAG = re.compile(r"</?(?:html|head|body|pre|code|div|p|samp|span|br|b|i|em|strong|tt|font)\b[^<>]*>", re.IGNORECASE)
_FENCE = re.compile(r"^\s*(?:```|~~~).*$", re.MULTILINE)
_XML = re.compile(r"<\?xml\b|<!DOCTYPE topology|<(?:topology|system|nvidia_smi_log|graphs)\b")


def unwrap(text: str) -> str:
    """The text itself; as it is where nothing surely stands around it.

    Args:
        text: as it was found.
    """
    text = clean(text)
    if _PAGE.match(text):
        text = html.unescape(_TAG.sub("", text))
    for _ in range(_DEPTH):
        shorter = _without_label(text)
        if shorter is None:
            break
        text = shorter
    return _document(text) or text


def _without_label(text: str) -> str | None:
    """The lines without the label that all of them have; `None` where they have none."""
    lines = text.split("\n")
    full = [line for line in lines if line.strip()]
    if len(full) < 2:
        return None
    for label in _LABELS:
        if all(label.match(line) for line in full):
            return "\n".join(label.sub("", line, count=1) if line.strip() else "" for line in lines)
    texts = set(labelled(full).values())
    return texts.pop() + "\n" if len(texts) == 1 else None


def labelled(lines: Sequence[str]) -> dict[str, str]:
    """The text of each label, where each of the lines has one and no label stands on one line alone; else nothing."""
    by_name: dict[str, list[str]] = {}
    for line in lines:
        match = _NAME.match(line)
        if match is None:
            return {}
        by_name.setdefault(match[1], []).append(line[match.end() :])
    alone = any(len(each) < 2 for each in by_name.values())
    return {} if alone else {name: "\n".join(each) for name, each in by_name.items()}


def _document(text: str) -> str | None:
    """The JSON object or XML document in a text that has other lines around it; `None` where there is none."""
    if text.lstrip().startswith(("{", "<")):
        return None
    bare = _FENCE.sub("", text)
    start = re.search(r"^\s*\{", bare, re.MULTILINE)
    if start is not None:
        rest = bare[start.start() :].lstrip()
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        return rest[:end]
    document = _XML.search(bare)
    end_of = bare.rfind(">")
    return bare[document.start() : end_of + 1] if document is not None and end_of > document.start() else None
