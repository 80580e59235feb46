"""Runs whose ranks die, stop, hang or fall out of step: each ends by itself, soon, with the right rank named."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dthpc.monitor.events import read_events
from dthpc.resilience.outcome import RankRecord, read_records
from dthpc.rundir import AttemptDir, RunDir, read_json
from tests.attempt.runs import alive, wait_for
from tests.integration.hangs import RANKS
from tests.integration.trial import submit

TIMEOUT_S = 6
WORDS = [
    f"cluster.tasks_per_node={RANKS}",
    "cluster.requeue=never",
    f"comm.timeout_s={TIMEOUT_S}",
    "comm.silence_s=4",
    "placement.bind=none",
    "follow=false",
    "json=true",
]


class Hang:
    """One run of one of the jobs in `hangs.py`."""

    def __init__(self, root: Path, job: str, *words: str, cluster: Any = None, patience_s: float = 120.0) -> None:
        self.run = RunDir(root / "runs" / job)
        own = [f"run.root={self.run.path.parent}", f"run.name={self.run.name}"]
        self.told = submit([*WORDS, f"job._target_=tests.integration.hangs.{job}", *words, *own], cluster)
        self.end: dict[str, Any] = wait_for(lambda: read_json(self.attempt.end), patience_s)

    @property
    def attempt(self) -> AttemptDir:
        return self.run.attempt(0)

    @property
    def reason(self) -> str:
        return str(self.end["reason"])

    def records(self) -> dict[int, RankRecord]:
        return read_records(self.attempt)

    def flights(self) -> dict[int, dict[str, Any]]:
        """The flight records that ranks left."""
        found = [read_json(path) for path in sorted(self.attempt.flight.glob("rank-*.json"))]
        return {record["rank"]: record for record in found if record}


JOBS = ["killed", "stopped", "endless", "different", "raises", "unheard", "stage_missing", "in_cxx", "patient"]


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Hang]]]:
    """All runs, a few at a time, since they wait more than they work."""
    root = tmp_path_factory.mktemp("hangs")
    with ThreadPoolExecutor(4) as threads:
        yield {job: threads.submit(Hang, root, job) for job in JOBS}


def test_a_rank_that_is_killed_ends_those_in_a_collective_and_those_elsewhere(
    hangs: dict[str, Future[Hang]],
) -> None:
    hang = hangs["killed"].result()
    assert hang.reason.startswith("rank 2 was killed by SIGKILL")
    records = hang.records()
    assert sorted(records) == [0, 1]
    assert all(record.code == 1 and record.echo and "rank 2" in str(record.error) for record in records.values())
    # Rank 0 was asleep and would be for minutes; nobody waited for a time-out.
    assert all(record.time < hang.end["time"] for record in records.values())
    assert hang.flights()[0]["main"].endswith("in killed")
    assert hang.flights()[0]["step"] == 1


def test_a_rank_that_is_stopped_is_noticed_by_its_silence(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["stopped"].result()
    assert hang.reason.startswith("no sign of life from rank 2 on ")
    assert sorted(hang.records()) == [0, 1]
    assert hang.flights()[0]["waiting"][0]["shape"] == [4096]


def test_a_rank_that_never_comes_is_named_with_the_place_where_it_is(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["endless"].result()
    assert hang.reason.startswith(
        f"collective 4 of group world does not end after {TIMEOUT_S} s: ranks 0-1 in all_reduce"
    )
    assert "rank 2 on " in hang.reason
    assert "its last call was all_reduce [4] float32 (tests/integration/hangs.py:" in hang.reason
    assert "its main thread is at tests/integration/hangs.py:" in hang.reason
    assert sorted(hang.records()) == [0, 1, 2] == sorted(hang.flights())
    assert read_json(hang.attempt.verdict)["blamed"] == [2]
    incidents = [event["what"] for event in read_events(hang.run.events)[0] if event["kind"] == "incident"]
    # On a machine with other work an earlier collective may be slow as well.
    assert list(dict.fromkeys(incidents)) == ["slow collective", "ranks out of step"]
    assert incidents[-1] == "ranks out of step"


def test_different_collectives_are_told_with_who_called_what(hangs: dict[str, Future[Hang]]) -> None:
    reason = hangs["different"].result().reason
    assert (
        "the ranks call different things: ranks 0-1 in all_reduce [4096] float32 (tests/integration/hangs.py:" in reason
    )
    assert "rank 2 in all_gather [512] float32 (tests/integration/hangs.py:" in reason


def test_a_rank_that_raises_is_the_cause_and_the_others_end_with_it(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["raises"].result()
    assert "rank 2 on " in hang.reason
    assert "ValueError: a hole in the data" in hang.reason
    records = hang.records()
    assert [records[rank].echo for rank in range(RANKS)] == [True, True, False]
    assert records[2].traceback_tail


def test_a_message_that_nobody_sends_is_blamed_on_its_sender(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["unheard"].result()
    assert hang.reason.startswith("rank 0's recv from rank 1 [7] float32 (tests/integration/hangs.py:")
    assert read_json(hang.attempt.verdict)["blamed"] == [1]


def test_a_stage_that_does_not_come_is_blamed_by_those_that_wait_for_its_activations(
    hangs: dict[str, Future[Hang]],
) -> None:
    hang = hangs["stage_missing"].result()
    assert "recv from rank 1" in hang.reason
    assert "tests/integration/hangs.py" in hang.reason
    assert read_json(hang.attempt.verdict)["blamed"] == [1]


def test_collectives_of_cxx_are_judged_too(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["in_cxx"].result()
    assert "of group world" in hang.reason
    assert read_json(hang.attempt.verdict)["blamed"] == [2]


def test_long_work_without_collectives_is_no_hang(hangs: dict[str, Future[Hang]]) -> None:
    hang = hangs["patient"].result()
    assert hang.end["cause"] == "finished"
    assert not hang.attempt.flight.exists()
    assert not hang.attempt.verdict.exists()


def test_no_process_is_left(hangs: dict[str, Future[Hang]]) -> None:
    for future in hangs.values():
        hang = future.result()
        pids = [record["pid"] for record in hang.flights().values()]
        wait_for(lambda pids=pids: not any(alive(pid) for pid in pids))


@pytest.mark.slurm
def test_over_two_nodes_exit_codes_survive_srun_and_the_cause_is_told(minicluster: Any, tmp_path: Path) -> None:
    nodes = ["cluster.nodes=2", "cluster.tasks_per_node=1", "cluster.time=0:10:00"]
    with ThreadPoolExecutor(2) as threads:
        killed, endless = threads.map(
            lambda job: Hang(tmp_path, job, *nodes, cluster=minicluster, patience_s=300.0), ["killed", "endless"]
        )
    assert killed.reason.startswith("rank 1 was killed by SIGKILL")
    assert [(record.rank, record.code, record.echo) for record in killed.records().values()] == [(0, 1, True)]
    assert endless.reason.startswith(
        f"collective 4 of group world does not end after {TIMEOUT_S} s: rank 0 in all_reduce"
    )
    assert "rank 1 on node" in endless.reason
    assert sorted(endless.flights()) == [0, 1] == sorted(endless.records())
    assert (endless.end["cause"], endless.end["exit_codes"]["srun"] != 0) == ("crash", True)
