"""One rank's watchdog, whose other end the test holds."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dthpc.comm.watchdog import watchdog as module
from dthpc.comm.watchdog.account import Witness
from dthpc.comm.watchdog.recorder import Recorder
from dthpc.comm.watchdog.torch_record import TorchRecord
from dthpc.comm.watchdog.watchdog import Ending, Watchdog
from dthpc.comm.watchdog.wire import Line, Message
from dthpc.rundir import read_json
from tests.attempt.runs import wait_for


class Group:
    """A group by name only."""

    group_name = "g"


class Rank:
    """A watchdog over a recorder that the test fills."""

    def __init__(self, folder: Path, timeout_s: float = 60.0, silence_s: float = 0.0) -> None:
        self.recorder, self.group, self.endings = Recorder(10), Group(), list[Ending]()
        mine, theirs = socket.socketpair()
        self.hub = Line(theirs)
        self.record = folder / "rank-00004.json"
        witness = Witness(4, "here", self.recorder, TorchRecord(), lambda: 9)
        self.watchdog = Watchdog(
            witness, Line(mine), folder, timeout_s=timeout_s, silence_s=silence_s, end=self.endings.append
        )

    def expect(self, kind: str) -> Message:
        end = time.monotonic() + 10
        while not self.hub.closed and select.select([self.hub], [], [], max(0.0, end - time.monotonic()))[0]:
            for message in self.hub.receive():
                if message["kind"] == kind:
                    return message
        raise AssertionError(f"no {kind}")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.watchdog.close()


def test_it_gives_signs_of_life_and_an_account(rank: Rank) -> None:
    rank.expect("alive")
    rank.recorder.end(rank.recorder.begin(rank.group, "barrier", ()), None)
    rank.hub.send({"kind": "tell"})
    account = rank.expect("account")["account"]
    assert (account["rank"], account["step"], account["calls"][0]["operation"]) == (4, 9, "barrier")
    assert rank.endings == []


def test_told_to_end_it_writes_the_record_and_ends(rank: Rank) -> None:
    rank.hub.send({"kind": "end", "why": "rank 1 is gone", "blamed": [1]})
    wait_for(lambda: rank.endings)
    assert rank.endings == [Ending("rank 1 is gone", (1,))]
    assert read_json(rank.record)["rank"] == 4


def test_when_rank_0_is_gone_it_ends(rank: Rank) -> None:
    rank.hub.close()
    assert wait_for(lambda: rank.endings)[0].blamed == (0,)


def test_after_the_hubs_goodbye_nothing_ends_it(rank: Rank) -> None:
    rank.hub.send({"kind": "bye"})
    wait_for(lambda: rank.watchdog._line.closed)
    rank.hub.close()
    rank.watchdog.close()
    assert rank.endings == []


def test_a_wait_is_told_at_half_of_the_time_out_and_again_when_it_is_overdue(tmp_path: Path) -> None:
    rank = Rank(tmp_path, timeout_s=1.0)
    try:
        rank.recorder.begin(rank.group, "barrier", ())
        assert not rank.expect("stuck")["over"]
        assert rank.expect("stuck")["over"]
    finally:
        rank.watchdog.close()


def test_without_an_answer_of_rank_0_an_overdue_wait_ends_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.5)
    rank = Rank(tmp_path, timeout_s=0.5)
    try:
        rank.recorder.begin(rank.group, "barrier", ())
        assert "rank 0 does not say why" in wait_for(lambda: rank.endings)[0].why
    finally:
        rank.watchdog.close()


def test_a_silent_rank_0_ends_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HUB_SLACK_S", 0.0)
    rank = Rank(tmp_path, silence_s=1.0)
    try:
        assert wait_for(lambda: rank.endings)[0].blamed == (0,)
    finally:
        rank.watchdog.close()


def test_a_main_thread_that_fails_waits_for_the_verdict_only_where_it_may_be_an_echo(rank: Rank) -> None:
    assert rank.watchdog.failed("ValueError: mine", echo=False) is None
    assert rank.expect("failed")["account"] is None
    rank.hub.send({"kind": "end", "why": "rank 2 is gone", "blamed": [2]})
    assert rank.watchdog.failed("connection reset by peer", echo=True) == Ending("rank 2 is gone", (2,))
    assert rank.expect("failed")["account"]["rank"] == 4
    # It ends by itself, so the watchdog does not end it.
    assert rank.endings == []


def test_sigusr1_writes_the_record_and_goes_on(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(rank.record.exists)
    assert read_json(rank.record)["signal"] == "SIGUSR1"
    rank.expect("alive")


def test_a_signal_to_a_forked_child_is_not_taken_for_one_to_this_process(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(2):
        rank.expect("alive")
    assert not rank.record.exists()


def test_a_stop_signal_that_is_not_answered_leaves_a_record(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(rank.record.exists)
        assert read_json(rank.record)["signal"] == "SIGUSR2"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_are_as_before_when_it_is_closed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    rank = Rank(tmp_path)
    assert signal.getsignal(signal.SIGUSR1) != before
    rank.watchdog.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.set_wakeup_fd(-1) == -1
