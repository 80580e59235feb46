from __future__ import annotations

import math

import pytest

from dthpc.monitor import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (-3, "0.00 s"),
        (0.424, "0.42 s"),
        (5.04, "5.0 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (123, "2m 03s"),
        (3599.7, "1h 00m"),
        (3725, "1h 02m"),
        (86400 * 3 + 3600 * 4, "3d 04h"),
    ],
)
def test_duration_picks_the_unit_and_never_shows_sixty(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (812, "812"), (999.6, "1.00k"), (12345, "12.3k"), (10.8e6, "10.8M"), (999.6e3, "1.00M")],
)
def test_count_has_three_figures(value: float | None, text: str) -> None:
    assert units.count(value) == text


def test_size_is_binary() -> None:
    assert [units.size(value) for value in (512, 1024, 43 * 2**20, None)] == ["512 B", "1.00 KiB", "43.0 MiB", "–"]


def test_step_time_changes_unit_at_one_second() -> None:
    assert [units.milliseconds(value) for value in (0.4123, 0.9996, 2.314)] == ["412 ms", "1.00 s", "2.31 s"]


@pytest.mark.parametrize(("value", "found"), [("nan", math.nan), (True, None), ("x", None), (None, None), (3, 3.0)])
def test_number_reads_what_the_event_log_writes(value: object, found: float | None) -> None:
    assert units.number(value) == pytest.approx(found, nan_ok=True)


def test_integer_refuses_what_is_not_finite() -> None:
    assert units.integer("inf") is None
    assert units.integer(7.0) == 7
