"""The hub with connections whose other ends the test holds."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dthpc.comm.watchdog import hub as module
from dthpc.comm.watchdog.account import Account
from dthpc.comm.watchdog.compare import Verdict
from dthpc.comm.watchdog.hub import Hub
from dthpc.comm.watchdog.wire import Line, Message
from tests.attempt.runs import wait_for

Call = dict[str, Any]


class Ranks:
    """A hub and the lines of its ranks."""

    def __init__(self, size: int, silence_s: float = 0.0) -> None:
        self.warned: list[Verdict] = []
        self.ended: list[Verdict] = []
        self.hub = Hub(size, silence_s, warn=self.warned.append, end=self.ended.append)
        self.lines = [self.connect(rank) for rank in range(size)]
        for rank in range(size):
            self.expect(rank, "alive")  # it is known to the hub

    def connect(self, rank: int, word: str | None = None) -> Line:
        line = Line(socket.create_connection(("127.0.0.1", self.hub.port), timeout=5))
        line.send({"kind": "hello", "word": word or self.hub.word, "rank": rank, "host": f"node{rank}"})
        return line

    def expect(self, rank: int, kind: str, seconds: float = 10.0) -> Message:
        """The next message of a kind to a rank."""
        line, end = self.lines[rank], time.monotonic() + seconds
        while not line.closed and select.select([line], [], [], max(0.0, end - time.monotonic()))[0]:
            for message in line.receive():
                if message["kind"] == kind:
                    return message
        raise AssertionError(f"no {kind}")

    def account(self, rank: int, *calls: Call, waits: bool = True) -> Message:
        groups = {"0": {"description": "world", "ranks": list(range(len(self.lines)))}}
        waiting = [{**call, "waited_s": 3.0} for call in calls if waits]
        account = Account(rank, f"node{rank}", calls=list(calls), waiting=waiting, groups=groups)
        return {"kind": "account", "account": account.to_json()}


CALL = {"group": "0", "operation": "allreduce", "sequence": 5, "peer": None, "shape": [4], "dtype": "float32"}
CALL |= {"state": "in flight", "age_s": 3.0, "place": "a.py:1"}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.hub.close()


def test_a_process_that_is_gone_ends_the_job_at_once(ranks: Ranks) -> None:
    ranks.expect(1, "alive")
    ranks.lines[1].close()
    for rank in (0, 2):
        end = ranks.expect(rank, "end")
        assert "rank 1 on node1" in end["why"]
        assert end["blamed"] == [1]
    assert [verdict.blamed for verdict in ranks.ended] == [[1]]


def test_a_rank_that_has_said_goodbye_may_go(ranks: Ranks) -> None:
    for line in ranks.lines[1:]:
        line.send({"kind": "bye"})
        line.close()
    for _ in range(2):
        ranks.expect(0, "alive")
    assert ranks.ended == []


def test_who_is_told_of_a_wait_asks_all_and_judges(ranks: Ranks) -> None:
    ranks.lines[0].send({"kind": "stuck", "over": False, "seconds": 3})
    for rank in range(3):
        ranks.expect(rank, "tell")
        ranks.lines[rank].send(ranks.account(rank, *([CALL] if rank < 2 else []), waits=rank < 2))
    (verdict,) = wait_for(lambda: ranks.warned)
    assert verdict.blamed == [2]
    assert ranks.ended == []
    ranks.lines[0].send({"kind": "stuck", "over": True, "seconds": 6})
    for rank in range(3):
        ranks.expect(rank, "tell")
        ranks.lines[rank].send(ranks.account(rank, *([CALL] if rank < 2 else []), waits=rank < 2))
    assert "does not end after 6 s" in ranks.expect(1, "end")["why"]
    assert [found.blamed for found in ranks.ended] == [[2]]


def test_a_rank_that_gives_no_account_is_judged_without(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACCOUNTS_S", 0.3)
    ranks.lines[0].send({"kind": "stuck", "over": True, "seconds": 6})
    for rank in range(2):
        ranks.expect(rank, "tell")
        ranks.lines[rank].send(ranks.account(rank, CALL))
    end = ranks.expect(0, "end")
    assert end["blamed"] == [2]
    assert "rank 2 on node2 gives no answer" in end["why"]


def test_an_error_that_speaks_for_itself_ends_the_others_at_once(ranks: Ranks) -> None:
    ranks.lines[2].send({"kind": "failed", "error": "ValueError: a hole", "echo": False, "account": None})
    assert ranks.expect(0, "end")["why"] == "rank 2 on node2 failed: ValueError: a hole"


def test_behind_a_broken_connection_the_rank_that_is_gone_is_looked_for(ranks: Ranks) -> None:
    account = ranks.account(0, CALL)["account"]
    ranks.lines[0].send({"kind": "failed", "error": "Connection closed by peer", "echo": True, "account": account})
    ranks.lines[2].close()
    assert ranks.expect(1, "end")["blamed"] == [2]


def test_a_collective_that_failed_is_judged_by_what_the_failed_rank_had_called(ranks: Ranks) -> None:
    error = "RuntimeError: [/build/pair.cc:3] Timed out"
    ranks.lines[0].send({"kind": "failed", "error": error, "echo": True, "account": ranks.account(0, CALL)["account"]})
    for rank in (1, 2):
        ranks.expect(rank, "tell")
        ranks.lines[rank].send(ranks.account(rank, *([CALL] if rank < 2 else []), waits=rank < 2))
    why = ranks.expect(1, "end")["why"]
    assert why.startswith("collective 5 of group world failed in rank 0 (RuntimeError: Timed out): ranks 0-1 in")


def test_a_silent_rank_ends_the_job_and_one_that_speaks_does_not() -> None:
    ranks = Ranks(2, silence_s=3.0)

    def speak(*speakers: int) -> bool:
        for rank in speakers:
            ranks.lines[rank].send({"kind": "alive"})
        return bool(select.select([], [], [], 0.05)) and bool(ranks.ended)

    try:
        begun = time.monotonic()
        wait_for(lambda: speak(0, 1) or time.monotonic() > begun + 4)
        assert ranks.ended == []
        wait_for(lambda: speak(0))
        assert ranks.ended[0].blamed == [1]
        assert "no sign of life from rank 1 on node1" in ranks.ended[0].headline
    finally:
        ranks.hub.close()


def test_strangers_are_not_listened_to(ranks: Ranks) -> None:
    stranger = ranks.connect(1, word="guessed")
    stranger.send({"kind": "failed", "error": "made up", "echo": False, "account": None})
    stranger.close()
    for _ in range(2):
        ranks.expect(0, "alive")
    assert ranks.ended == []


def test_when_the_hub_closes_the_ranks_are_told() -> None:
    ranks = Ranks(2)
    ranks.hub.close()
    assert ranks.expect(1, "bye")
    assert ranks.ended == []
