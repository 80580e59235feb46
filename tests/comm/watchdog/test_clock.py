from __future__ import annotations

import time

import pytest

from dthpc.comm.watchdog.clock import Clock


class Time:
    """A clock that the test sets."""

    moment = 100.0


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> type[Time]:
    monkeypatch.setattr(time, "monotonic", lambda: Time.moment)
    Time.moment = 100.0
    return Time


def test_time_in_which_the_process_was_stopped_does_not_count(hand: type[Time]) -> None:
    clock = Clock()
    begun = clock.now()
    hand.moment += 1
    assert clock.now() - begun == 1
    hand.moment += 3600
    assert clock.now() - begun == 1
    assert clock.age(100.0) == 0
    hand.moment += 2
    assert clock.now() - begun == 3
    assert clock.age(100.0) == 2
    assert clock.age(hand.moment - 1) == 1
