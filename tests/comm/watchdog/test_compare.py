"""Verdicts on accounts that are written by hand, as no real ranks could be made to give them all."""

from __future__ import annotations

from typing import Any

import pytest

from dthpc.comm.watchdog.account import Account, Call
from dthpc.comm.watchdog.compare import Verdict, describe, judge

GROUPS = {"0": {"description": "world", "ranks": [0, 1, 2, 3]}, "7": {"description": "tp", "ranks": [2, 3]}}
HOW = "does not end after 57 s"


def call(operation: str = "allreduce", sequence: int = 17, **other: Any) -> Call:
    known = {"group": "0", "peer": None, "shape": [4096], "dtype": "float32", "state": "in flight", "age_s": 57.0}
    return {**known, "operation": operation, "sequence": sequence, "place": "/home/ada/train/step.py:88", **other}


def rank(number: int, *calls: Call, waits: bool = True, main: str = "/a/b/loop.py:5 in train") -> Account:
    waiting = [{**calls[-1], "waited_s": calls[-1]["age_s"]}] if waits else []
    return Account(number, f"node{number // 2}", calls=list(calls), waiting=waiting, groups=GROUPS, main=main)


def judged(*accounts: Account, absent: dict[int, str] | None = None) -> Verdict:
    return judge({account.rank: account for account in accounts}, absent or {}, HOW)


def test_the_rank_that_never_came_is_named_with_what_it_does() -> None:
    idle = rank(3, call(sequence=16, shape=[8], age_s=61.0, state="finished"), waits=False)
    verdict = judged(*(rank(number, call()) for number in range(3)), idle)
    assert verdict.blamed == [3]
    assert verdict.text() == (
        "collective 17 of group world does not end after 57 s: ranks 0-2 in all_reduce [4096] float32 "
        "(ada/train/step.py:88); rank 3 on node1 never came: its last call was all_reduce [8] float32 "
        "(ada/train/step.py:88), 61 s ago; its main thread is at a/b/loop.py:5 in train"
    )


def test_several_that_never_came_have_a_line_each() -> None:
    idle = [rank(number, call(sequence=16), waits=False) for number in (2, 3)]
    verdict = judged(rank(0, call()), rank(1, call()), *idle)
    assert verdict.headline.endswith(
        "ranks 0-1 in all_reduce [4096] float32 (ada/train/step.py:88); ranks 2-3 never came"
    )
    assert [line[:6] for line in verdict.details] == ["rank 2", "rank 3"]


def test_ranks_that_call_different_things_are_told_with_what_each_called() -> None:
    other = call("_allgather_base", shape=[512], place="/x/train/eval.py:9")
    verdict = judged(*(rank(number, call()) for number in range(3)), rank(3, other))
    assert verdict.blamed == [3]
    assert (
        "the ranks call different things: ranks 0-2 in all_reduce [4096] float32 (ada/train/step.py:88), "
        "rank 3 in all_gather [512] float32 (x/train/eval.py:9)" in verdict.headline
    )


def test_of_two_ranks_that_call_different_things_none_is_blamed() -> None:
    groups = {"0": {"description": "world", "ranks": [0, 1]}}
    accounts = [rank(0, call()), rank(1, call("broadcast"))]
    for account in accounts:
        account.groups = groups
    verdict = judged(*accounts)
    assert verdict.blamed == []
    assert [line[:6] for line in verdict.details] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("operation", "differs"), [("allreduce", True), ("gather", False)])
def test_sizes_must_agree_only_where_the_operation_asks_for_it(operation: str, differs: bool) -> None:
    verdict = judged(*(rank(number, call(operation)) for number in range(3)), rank(3, call(operation, shape=[7])))
    assert ("different things" in verdict.headline) == differs


@pytest.mark.parametrize(
    "words", ["on node1 is gone", "has finished its job", "on node1 gives no answer; last heard of 5 s ago"]
)
def test_a_rank_without_an_account_is_told_with_what_is_known_of_it(words: str) -> None:
    verdict = judged(*(rank(number, call()) for number in range(3)), absent={3: words})
    assert verdict.headline.endswith(f"rank 3 {words}")
    assert verdict.blamed == [3]


def test_a_chain_of_waits_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    # 0 and 1 wait for 2, which waits for 3 in another group, whatever has been waited for longer.
    idle = rank(3, call(sequence=4, group="7", state="finished"), waits=False)
    blocked = rank(2, call(sequence=5, group="7", age_s=50.0))
    verdict = judged(rank(0, call()), rank(1, call()), blocked, idle)
    assert verdict.headline.startswith("collective 5 of group tp does not end")
    assert verdict.blamed == [3]


def test_a_message_that_nobody_sends_is_blamed_on_its_sender() -> None:
    sender = rank(1, call(sequence=16, state="finished"), waits=False)
    verdict = judged(rank(0, call("recv", 3, peer=1, shape=[7])), sender)
    assert verdict.headline.startswith(
        "rank 0's recv from rank 1 [7] float32 (ada/train/step.py:88) in group world does not end after 57 s: "
        "rank 1 on node0 does not answer: its last call was"
    )
    assert verdict.blamed == [1]


def test_what_only_torch_has_seen_is_judged_by_its_numbers() -> None:
    def of(number: int, *calls: Call) -> Account:
        return Account(number, "node0", torch_calls=list(calls), groups=GROUPS)

    done, open_ = call("all_reduce", 4, place="", state="finished"), call("all_reduce", 5, place="")
    verdict = judged(*(of(number, done, open_) for number in range(3)), of(3, done))
    assert verdict.headline.startswith(
        f"collective 5 of group world {HOW}: ranks 0-2 in all_reduce [4096] float32; rank 3"
    )
    assert verdict.blamed == [3]


def test_a_collective_to_which_all_came_blames_nobody() -> None:
    verdict = judged(*(rank(number, call()) for number in range(4)))
    assert "though all its ranks came" in verdict.headline
    assert verdict.blamed == []
    assert len(verdict.details) == 4


def test_where_nobody_waits_any_more_what_all_do_is_told() -> None:
    verdict = judged(rank(0, call(), waits=False), Account(1, "node0"), absent={2: "is gone"})
    assert verdict.headline == f"a collective {HOW}, and no rank waits in one that is known"
    assert verdict.details[1:] == ["rank 1 on node0: it has called nothing yet", "rank 2 is gone"]


def test_calls_are_described_as_users_know_them() -> None:
    assert describe(call("recv_anysource", place="", shape=None, dtype=None)) == "recv from any rank"
    assert describe(call("send", peer=3, place="", dtype=None)) == "send to rank 3 [4096]"
    assert describe(call("_reduce_scatter_base", place="step.py:1")) == "reduce_scatter [4096] float32 (step.py:1)"
