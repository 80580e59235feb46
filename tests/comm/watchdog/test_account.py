from __future__ import annotations

import json

from dthpc.comm.watchdog.account import Account
from tests.comm.watchdog import tasks
from tests.ranks import pool


def test_a_blocked_rank_says_what_it_waits_for_and_where_it_is() -> None:
    account, _ = pool().run(2, tasks.waiting)
    assert account is not None
    (call,) = account.waiting
    assert (call["operation"], call["shape"], call["state"]) == ("allreduce", [2, 21], "in flight")
    assert call["waited_s"] >= 0
    assert "watchdog/tasks.py:" in account.main
    assert account.main.endswith("in waiting")
    assert account.step == 3
    assert account.groups[call["group"]] == {"description": "world", "ranks": [0, 1]}
    assert any("all_reduce" in line for line in account.stacks["MainThread"])
    assert account.torch_calls[-1]["state"] == "in flight"


def test_an_account_comes_back_from_json() -> None:
    account = Account(3, "node1", 17, calls=[{"group": "0"}], signal="SIGTERM")
    assert Account.of_json(json.loads(json.dumps(account.to_json()))) == account
