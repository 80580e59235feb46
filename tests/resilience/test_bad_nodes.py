"""Going on without refused nodes, and when not to."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from dthpc.resilience.attempts import Attempt, attempts_without_progress
from dthpc.resilience.bad_nodes import BadNodes, Supply, decide_without, read_refusal, refused_before
from dthpc.resilience.decide import Limits
from dthpc.rundir import AttemptDir, write_json

WHY = {"n2": "pair GB/s: 0.1, the others 10"}
PLENTY = Supply(3, 9, (), "partition main")
REQUEUE = Limits("requeue")


def refusal(number: int, *nodes: str) -> Attempt:
    return Attempt(number, {}, {"cause": "bad_nodes", "decision": "requeue", "bad_nodes": dict.fromkeys(nodes, "slow")})


def test_the_job_goes_on_without_them() -> None:
    decision = decide_without(WHY, [], PLENTY, REQUEUE)
    assert (decision.cause, decision.action) == ("bad_nodes", "requeue")
    assert decision.reason == "preflight refuses n2 (pair GB/s: 0.1, the others 10); goes on without it"
    assert decide_without({**WHY, "n3": "slow"}, [refusal(0, "n1")], PLENTY, Limits("resubmit")).action == "resubmit"


@pytest.mark.parametrize(
    ("history", "supply", "limits", "told"),
    [
        ([refusal(0, "n1", "n2")], PLENTY, REQUEUE, "told to leave out the same nodes before"),
        ([], Supply(3, 2, (), "partition main"), REQUEUE, "partition main has 2 nodes, and the run needs 3"),
        ([], Supply(3, 9, ("n1", "n2")), REQUEUE, r"cluster\.nodelist demands n2"),
        ([], PLENTY, Limits("never"), r"cluster\.requeue=never"),
        ([], PLENTY, Limits("restart"), "no other nodes here"),
        ([refusal(0, "n1")], PLENTY, Limits("requeue", max_attempts=2), r"resilience\.max_attempts=2 is used up"),
    ],
)
def test_where_it_would_lead_to_nothing_the_run_stops_and_says_why(
    history: list[Attempt], supply: Supply, limits: Limits, told: str
) -> None:
    import re

    decision = decide_without(WHY, history, supply, limits)
    assert decision.action == "stop"
    assert re.search(told, decision.reason)


def test_each_attempt_leaves_out_one_more_until_too_few_remain() -> None:
    nodes, history = [f"n{i}" for i in range(9)], []
    for number in range(20):
        refused = {nodes[number % 9]: "slow"}
        gone = {*refused_before(history), *refused}
        decision = decide_without(refused, history, Supply(3, 9 - len(gone)), REQUEUE)
        history.append(refusal(number, *refused))
        if decision.action == "stop":
            break
    assert len(history) == 7


def test_refusals_do_not_count_as_attempts_without_progress() -> None:
    crash = Attempt(0, {}, {"cause": "crash"})
    assert attempts_without_progress([crash, refusal(1, "n1"), refusal(2, "n2")]) == 1


@pytest.mark.parametrize(("stored", "found"), [({"refused": WHY}, WHY), ({"refused": {}}, {}), ([1], {}), (None, {})])
def test_what_ranks_left_is_read(tmp_path: Path, stored: Any, found: dict[str, str]) -> None:
    attempt = AttemptDir(tmp_path / "0")
    if stored is not None:
        write_json(attempt.preflight, stored)
    assert read_refusal(attempt) == found


def test_the_exception_names_the_nodes_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BadNodes(WHY)))
    assert (str(error), error.why) == ("preflight refuses n2: pair GB/s: 0.1, the others 10", WHY)
