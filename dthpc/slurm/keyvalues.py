"""The `Key=Value` records that `scontrol show` prints, in the form of several lines and as one-liners (`-o`).

Values may hold blanks (job names, commands, comments, reasons) and even words with an equals sign, so that blanks alone
do not tell where a value ends.
"""

from __future__ import annotations

import re

from dthpc.errors import UserError
from dthpc.slurm.units import words

Record = dict[str, str]

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][\w:/&.-]*(?:\(s\))?)=")

FREE_TEXT = words(
    "JobName Command Comment AdminComment SystemComment WorkDir StdErr StdIn StdOut Reason OS Extra SubmitLine"
)
"""Keys whose values hold what people typed."""

_AFTER_FREE_TEXT = {
    "JobName": {"UserId", "GroupId", "Priority", "Account", "Partition", "JobState", "NodeList", "NumNodes"},
    "Comment": {"StdErr", "WorkDir", "CurrentWatts", "CapWatts"},
    "AdminComment": {"SystemComment", "StdErr", "Comment"},
    "SystemComment": {"AdminComment", "StdErr", "Comment"},
    "Command": {"WorkDir"},
    "SubmitLine": {"WorkDir"},
    "Reason": {"Dependency", "Comment"},
    "OS": {"RealMemory"},
    "Extra": {"Reason", "Comment"},
}
"""The keys that may follow a free text, which alone end it on a one-liner. Paths end at any key there."""


def clean_lines(text: str) -> list[str]:
    """The lines of a text without colour codes, carriage returns and trailing blanks."""
    return [_COLOUR.sub("", line).rstrip() for line in text.replace("\r", "\n").split("\n")]


def parse_records(text: str, first_key: str) -> list[Record]:
    """The records of an output of `scontrol show`; each starts with `first_key`.

    Lines before the first record (prompts, warnings) are skipped. Where a key comes twice in a record, the first
    counts: `scontrol -d` repeats some of them for parts of the job.

    Raises:
        UserError: the text holds no such record; the message cites what it holds instead.
    """
    records: list[Record] = []
    for line in clean_lines(text):
        start = re.search(rf"(?:^|\s){re.escape(first_key)}=", line)
        # A record starts a line; the same key inside a line belongs to a message about it.
        if start is not None and not line[: start.start()].strip():
            records.append({})
        for key, value in _pairs(line.strip()) if records else ():
            records[-1].setdefault(key, value)
    if not records:
        said = " | ".join(line for line in clean_lines(text) if line)[:300]
        raise UserError(f"Slurm's answer holds no {first_key}=", key="scontrol", value=said or "(nothing)")
    return records


def parse_assignments(text: str) -> Record:
    """The `Key = Value` lines of `scontrol show config`.

    Raises:
        UserError: no line has that form.
    """
    pairs = (line.partition("=") for line in clean_lines(text) if "=" in line)
    values = {key.strip(): value.strip() for key, _, value in pairs if re.fullmatch(r"\s*[\w/.-]+\s*", key)}
    if not values:
        raise UserError("holds no `Key = Value` line", key="scontrol show config", value=text[:300] or "(nothing)")
    return values


def _pairs(line: str) -> list[tuple[str, str]]:
    """The pairs of one line."""
    found = list(_KEY.finditer(line))
    # A one-liner holds keys that a record of several lines spreads; there a free text runs to the end of its line.
    spread = len(found) > 12
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(found):
        match = found[position]
        following = position + 1
        if match[1] in _AFTER_FREE_TEXT and (spread or match[1] == "JobName"):
            later = (index for index in range(following, len(found)) if found[index][1] in _AFTER_FREE_TEXT[match[1]])
            following = next(later, following if spread else len(found))
        elif match[1] in FREE_TEXT and position == 0 and not spread:
            following = len(found)
        end = found[following].start() if following < len(found) else len(line)
        pairs.append((match[1], line[match.end() : end].strip()))
        position = following
    return pairs
