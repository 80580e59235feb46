"""Numbers as people read them: durations, counts, sizes; one place, so that every door prints the same units."""

from __future__ import annotations

import math
import time

UNKNOWN = "–"
"""What is shown for a value that is not known; never a made-up number."""


def number(value: object) -> float | None:
    """A field of an event as a float; `None` where it is absent or no number. Non-finite values are written as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def integer(value: object) -> int | None:
    """A field of an event as an int; `None` where it is absent, not finite, or no number."""
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) else None


def text(value: object) -> str | None:
    """A field of an event as a text on one line; `None` where it is absent or empty."""
    return " ".join(str(value).split()) or None if value is not None else None


def duration(seconds: float | None) -> str:
    """Seconds as `0.42 s`, `45 s`, `2m 03s`, `1h 02m` or `3d 04h`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def milliseconds(seconds: float | None) -> str:
    """A step time: `412 ms`, or `2.31 s` from one second on."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def count(value: float | None) -> str:
    """A count with three figures: `812`, `12.3k`, `10.8M`, `7.50G`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.{_decimals(scaled)}f}{suffix}"
    return f"{value:.0f}"


def size(value: float | None) -> str:
    """Bytes in binary units: `512 B`, `41.2 MiB`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.{_decimals(scaled)}f} {suffix}"
    return f"{value:.0f} B"


def decimal(value: float | None, places: int = 3) -> str:
    """A plain number with fixed places, `nan` and `inf` said as such."""
    return UNKNOWN if value is None else f"{value:.{places}f}"


def clock(moment: float | None) -> str:
    """A unix time in local time: `2026-01-31 14:05:09`."""
    return UNKNOWN if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _decimals(scaled: float) -> int:
    magnitude = abs(scaled)
    return 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
