"""The real command on this machine: runs that are interrupted in every way end with the bits of one that was not.

The runs go on side by side, since each of them waits for much; each test waits for its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dthpc.rundir import read_json
from tests.attempt.runs import alive, wait_for
from tests.integration.trial import STEPS, Trial, write_text

GATES = (3, 7)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def reference(root: Path) -> Trial:
    """A run that nobody interrupts."""
    trial = Trial(root, "reference").submit()
    trial.end(0)
    return trial


def keeper_of(trial: Trial) -> int:
    return int(trial.job)


def finish(trial: Trial, attempt: int) -> None:
    """Open all gates, wait for the end, and check that nothing is left behind."""
    for step in GATES:
        trial.open(step)
    trial.end(attempt)
    wait_for(lambda: not alive(keeper_of(trial)))
    assert not trial.run.lock.exists()


def test_an_undisturbed_run_finishes_in_one_attempt(reference: Trial) -> None:
    assert reference.ends() == [("finished", "finish")]
    assert sorted(reference.losses()) == list(range(1, STEPS + 1))
    assert read_json(reference.run.attempt(0).environment)["packages"]["torch"]
    assert [path.name for path in sorted(reference.run.attempt(0).path.glob("rank-*.log"))] == [
        "rank-00000.log",
        "rank-00001.log",
    ]


def preempted(root: Path) -> Trial:
    """Asked to stop twice."""
    trial = Trial(root, "preempted", gates=GATES).submit()
    for attempt, step in enumerate(GATES):
        trial.held(step)
        os.kill(keeper_of(trial), signal.SIGUSR2)
        assert trial.end(attempt)["cause"] == "preempted"
    finish(trial, 2)
    return trial


def stopped(root: Path) -> Trial:
    """Ended by Ctrl-C, and started again."""
    trial = Trial(root, "stopped", gates=GATES).submit().held(3)
    os.kill(keeper_of(trial), signal.SIGINT)
    end = trial.end(0)
    assert (end["cause"], end["decision"]) == ("stopped", "stop")
    assert "state saved at step" in end["reason"]
    wait_for(lambda: not alive(keeper_of(trial)))
    trial.submit()
    finish(trial, 1)
    return trial


def killed(root: Path) -> Trial:
    """Its keeper killed, and started again."""
    trial = Trial(root, "killed", "checkpoint.every=2", gates=GATES).submit().held(3)
    os.kill(keeper_of(trial), signal.SIGKILL)
    ranks = [read_json(trial.run.attempt(0).path / f"rank-{rank:05d}.json") for rank in range(2)]
    assert ranks == [None, None]
    wait_for(lambda: not alive(keeper_of(trial)))
    trial.submit()
    finish(trial, 1)
    return trial


def rank_killed(root: Path) -> Trial:
    """One of its ranks killed."""
    trial = Trial(root, "rank-killed", "checkpoint.every=2", gates=GATES).submit().held(3)
    os.kill(pid_of_rank(keeper_of(trial), 1), signal.SIGKILL)
    end = trial.end(0)
    assert (end["cause"], end["decision"]) == ("crash", "restart")
    finish(trial, 1)
    return trial


@pytest.fixture(scope="module")
def runs(root: Path, reference: Trial) -> Iterator[dict[str, Future[Trial]]]:
    """All interrupted runs, started once the first run has packed the data."""
    with ThreadPoolExecutor() as threads:
        yield {act.__name__: threads.submit(act, root) for act in (preempted, stopped, killed, rank_killed)}


def test_preempted_twice_it_goes_on_by_itself(runs: dict[str, Future[Trial]], reference: Trial) -> None:
    trial = runs["preempted"].result()
    assert trial.ends() == [("preempted", "restart"), ("preempted", "restart"), ("finished", "finish")]
    assert trial.bits() == reference.bits()
    assert trial.losses() == reference.losses()


def test_stopped_it_goes_on_with_the_same_command(runs: dict[str, Future[Trial]], reference: Trial) -> None:
    trial = runs["stopped"].result()
    assert trial.ends()[-1] == ("finished", "finish")
    assert trial.bits() == reference.bits()


def test_killed_with_its_keeper_it_goes_on_from_the_last_checkpoint(
    runs: dict[str, Future[Trial]], reference: Trial
) -> None:
    trial = runs["killed"].result()
    assert trial.ends() == [("lost", "restart"), ("finished", "finish")]
    assert trial.bits() == reference.bits()


def test_a_rank_that_is_killed_is_replaced(runs: dict[str, Future[Trial]], reference: Trial) -> None:
    assert runs["rank_killed"].result().bits() == reference.bits()


def pid_of_rank(keeper: int, rank: int) -> int:
    """The child of a keeper that has a rank."""
    for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
        if f"DTHPC_RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank} under {keeper}")
