"""Time as the watchdogs count it."""

from __future__ import annotations

import time

BEAT_S = 1.0
"""Seconds between two signs of life."""

_GAP_S = 5 * BEAT_S


class Clock:
    """Seconds in which this process could run.

    A process that was stopped as a whole (`scontrol suspend`, a debugger) finds on waking that nobody has been heard of
    and every collective has taken ages. That time does not count.
    """

    def __init__(self) -> None:
        self._last = self._resumed = time.monotonic()
        self._missed = 0.0

    def now(self) -> float:
        """Seconds since some moment in the past; to be asked at least every second."""
        moment = time.monotonic()
        if moment - self._last > _GAP_S:
            self._missed += moment - self._last
            self._resumed = moment
        self._last = moment
        return moment - self._missed

    def age(self, since: float) -> float:
        """Seconds since a value of `time.monotonic()`, or since this process last went on."""
        return time.monotonic() - max(since, self._resumed)
