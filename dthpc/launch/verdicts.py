"""What a check before the launch says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dthpc.errors import UserError


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check."""

    check: str
    """What was looked at."""

    status: str
    """`ok`, `warning` (said, but nothing is refused) or `error`."""

    note: str
    """One line."""

    error: UserError | None = None
    """What to raise."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"check": self.check, "status": self.status, "note": self.note}


def ok(check: str, note: str) -> Verdict:
    """Nothing is wrong."""
    return Verdict(check, "ok", note)


def warning(check: str, note: str) -> Verdict:
    """Something that the user should know, and may want."""
    return Verdict(check, "warning", note)


def error(check: str, found: UserError) -> Verdict:
    """Something that must be mended first."""
    return Verdict(check, "error", found.message(), found)


def plural(count: int | str, noun: str) -> str:
    """`1 node`, `2 nodes`, `no nodes`, `2-4 nodes`."""
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"
