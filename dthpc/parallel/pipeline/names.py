"""The names of the pipeline schedules, and what each needs; free of torch."""

from __future__ import annotations

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "pipedream")


def chunks_of(schedule: str, asked: int | None) -> int:
    """Chunks of layers on each rank: what was asked for, or what the schedule usually has."""
    if asked is not None:
        return asked
    return 2 if schedule in ("interleaved", "zbv") else 1
