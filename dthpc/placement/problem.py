"""One form for what is wrong with a node, a network or a setting, whoever finds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""The gravest first."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth knowing."""

    severity: str
    """`error`: ranks can't meet, will fail, or crawl; `warning`: they may, or lose speed; `note`."""

    what: str
    """What was seen: a device, a setting with its value, nodes."""

    why: str
    """What it does to a run."""

    fix: str
    """What to do, or to write instead."""

    node: str | None = None
    """Where it was seen, if there are several."""

    setting: str | None = None
    """Name of the variable or key, where one is at fault."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not known is left out."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def lines(self) -> list[str]:
        """For a report."""
        return [f"{self.severity}: {self._seen()}: {self.why}", f"  fix: {self.fix}"]

    def __str__(self) -> str:
        """For a line of a log."""
        return f"{self.severity}: {self._seen()}: {self.why}. Instead: {self.fix}"

    def _seen(self) -> str:
        return f"{self.what} ({self.node})" if self.node else self.what


def gravest_first(problems: Iterable[Problem]) -> list[Problem]:
    """Problems by severity, those of one in their order."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))
