"""Training on a real Slurm through everything that interrupts it: the same bits as an undisturbed run, or a clear end.

All scenarios run at once, each driven by what happens in it: a gate inside the run tells where it is, records tell how
an attempt ended, and `scontrol` starts a requeued job that Slurm would hold back for two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.attempt.runs import wait_for
from tests.integration.trial import STEPS, Trial, write_text

pytestmark = pytest.mark.slurm

FAR = "cluster.time=0:10:00"
TWO_RANKS = ("cluster.tasks_per_node=2",)
# The last step before the end is a gate in most runs, so that nothing finishes before the test has looked at it.
PREEMPTED_NODES = {"grace": "node1", "main": "node2"}


class Stage:
    """The scenarios, all started at once; each test waits for its own."""

    def __init__(self, cluster: Any, root: Path) -> None:
        self.cluster = cluster
        self.root = root
        self._pool = ThreadPoolExecutor(16)
        self._preempted = [self._start(self._preempt, partition) for partition in PREEMPTED_NODES]
        self._others: dict[str, Future[Any]] = {
            "reference": self._start(self._undisturbed),
            "time limit": self._start(self._time_limit),
            "requeued": self._start(self._requeue),
            "cancelled": self._start(self._cancel),
            "array": self._start(self._array),
            "resubmitted": self._start(self._resubmit),
            "finished": self._start(self._requeue_finished),
            "broken": self._start(self._broken),
            "node lost": self._start(self._lose_node),
        }

    def _start(self, scenario: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(scenario, *arguments)

    def __getitem__(self, name: str) -> Any:
        if name in PREEMPTED_NODES:
            return self._preempted[list(PREEMPTED_NODES).index(name)].result()
        return self._others[name].result()

    def close(self) -> None:
        """Wait for all threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def trial(self, name: str, *overrides: str, gates: tuple[int, ...] = ()) -> Trial:
        """A run on the cluster."""
        return Trial(self.root, name, *overrides, gates=gates, cluster=self.cluster)

    # --- the scenarios ----------------------------------------------------------------------------------------------

    def _undisturbed(self) -> Trial:
        trial = Trial(self.root, "reference").submit()
        trial.end(0)
        return trial

    def _preempt(self, partition: str) -> Trial:
        where = (f"cluster.partition={partition}", f"cluster.nodelist={PREEMPTED_NODES[partition]}")
        trial = self.trial(f"preempted-{partition}", *TWO_RANKS, *where, FAR, gates=(4,)).submit().held(4)
        self.cluster.preempt(trial.job)
        trial.end(0)
        return trial.open(4).release().done()

    def _time_limit(self) -> Trial:
        trial = self.trial("time-limit", *TWO_RANKS, *self._quiet(), FAR, gates=(3, 7)).submit()
        for attempt, step in enumerate((3, 7)):
            trial.held(step)
            # Limits are whole minutes: one that leaves 30 to 90 seconds, when the early signal is due at once.
            minutes = (seconds_of(self.cluster.job(trial.job)["RunTime"]) + 90) // 60
            self.cluster.output("scontrol", "update", f"JobId={trial.job}", f"TimeLimit={minutes}")
            trial.end(attempt)
            trial.requeued()
            self.cluster.output("scontrol", "update", f"JobId={trial.job}", "TimeLimit=10")
            trial.open(step).release()
        return trial.done()

    def _requeue(self) -> Trial:
        trial = self.trial("requeued", *TWO_RANKS, *self._quiet(), FAR, gates=(4,)).submit().held(4)
        self.cluster.output("scontrol", "requeue", trial.job)
        trial.end(0)
        return trial.open(4).release().done()

    def _cancel(self) -> Trial:
        trial = self.trial("cancelled", *TWO_RANKS, *self._quiet(), FAR, gates=(4,)).submit().held(4)
        self.cluster.output("scancel", trial.job)
        return trial.done("CANCELLED")

    def _array(self) -> list[Trial]:
        """Two tasks; the last one, whose job id is that of the whole array, is asked to go on later."""
        both = self.trial("array", *self._quiet(), FAR, "run.name=array-${run.seed}", "run.seed=1,2", gates=(4,))
        jobs = [run["job_id"] for run in _submit_sweep(both)]
        trials = [self.trial(f"array-{seed}") for seed in (1, 2)]
        for trial, job in zip(trials, jobs, strict=True):
            trial.job = job
            trial.held(4, ranks=1)
        self.cluster.output("scancel", "-s", "USR2", trials[1].job)
        trials[1].end(0)
        trials[1].requeued()
        self.states = [self.cluster.job(trial.job)["JobState"] for trial in trials]
        trials[1].open(4).release()
        trials[1].done()
        trials[0].open(4).done()
        return trials

    def _resubmit(self) -> Trial:
        """A site that does not requeue: the run goes on in a job of its own."""
        where = (*TWO_RANKS, *self._quiet(), FAR, "cluster.requeue=resubmit")
        trial = self.trial("resubmitted", *where, gates=(4,)).submit().held(4)
        self.cluster.output("scancel", "-s", "USR2", trial.job)
        trial.end(0)
        self.first_job = trial.open(4).job
        trial.job = wait_for(trial.continuation, 60)
        return trial.done()

    def _requeue_finished(self) -> Trial:
        trial = self.trial("finished", *self._quiet(), FAR).submit().done()
        self.cluster.output("scontrol", "requeue", trial.job)
        trial.release()
        return trial.done()

    def _broken(self) -> Trial:
        job = "job._target_=tests.integration.gate.broken"
        limit = "resilience.max_attempts_without_progress=2"
        trial = self.trial("broken", *self._quiet(), FAR, job, limit).submit()
        trial.end(0)
        trial.release()
        return trial.done("FAILED")

    def _lose_node(self) -> Trial:
        """Both nodes of a run are free once the preempted ones have gone; then one of them vanishes."""
        for future in self._preempted:
            future.result()
        where = ("cluster.nodes=2", "cluster.tasks_per_node=1", "cluster.exclude=node3")
        trial = self.trial("node-lost", *where, FAR, "checkpoint.every=2", gates=(5,)).submit().held(5)
        lost = trial.start(0)["nodes"][1]
        self.cluster.link_down(lost)
        try:
            trial.requeued().open(5)
            self.cluster.output("scontrol", "update", f"JobId={trial.job}", "ExcNodeList=", "StartTime=now")
            return trial.done()
        finally:
            self.cluster.link_up(lost)

    def _quiet(self) -> tuple[str, ...]:
        return ("cluster.nodelist=node3",)


def seconds_of(run_time: str) -> int:
    """Seconds in `00:01:30`."""
    hours, minutes, seconds = map(int, run_time.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def _submit_sweep(trial: Trial) -> list[dict[str, Any]]:
    from tests.integration.trial import submit

    words = [word for word in trial.words if word != "run.name=array"]
    found = submit(["-m", *words], trial.cluster)["runs"]
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def stage(minicluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("slurm")
    write_text(root / "text")
    started = Stage(minicluster, root)
    yield started
    started.close()


def has_the_bits_of(trial: Trial, reference: Trial) -> bool:
    """Parameters, optimizer state and random numbers after the last step, and the loss of each step."""
    assert trial.losses() == reference.losses()
    assert sorted(trial.losses()) == list(range(1, STEPS + 1))
    return trial.bits() == reference.bits()


@pytest.mark.parametrize("partition", list(PREEMPTED_NODES))
def test_a_preempted_run_saves_requeues_itself_and_ends_with_the_same_bits(stage: Stage, partition: str) -> None:
    trial = stage[partition]
    assert trial.ends() == [("preempted", "requeue"), ("finished", "finish")]
    assert [trial.start(attempt)["restart_count"] for attempt in (0, 1)] == [0, 1]
    assert has_the_bits_of(trial, stage["reference"])


def test_the_time_limit_is_forestalled_as_often_as_it_comes(stage: Stage) -> None:
    trial = stage["time limit"]
    assert trial.ends() == [("time_limit", "requeue"), ("time_limit", "requeue"), ("finished", "finish")]
    assert trial.end(0)["signals"] == []  # the early signal goes to the ranks alone
    assert has_the_bits_of(trial, stage["reference"])


def test_a_run_that_an_administrator_requeues_goes_on(stage: Stage) -> None:
    trial = stage["requeued"]
    assert trial.ends() == [("requeued", "requeue"), ("finished", "finish")]
    assert has_the_bits_of(trial, stage["reference"])


def test_a_cancelled_run_ends_says_so_and_does_not_come_back(stage: Stage) -> None:
    trial = stage["cancelled"]
    assert trial.ends() == [("cancelled", "stop")]
    assert "cancelled (scancel); a cancelled run is not requeued" in trial.keeper_log()
    assert stage.cluster.job(trial.job)["Restarts"] == "0"


def test_a_run_whose_node_vanishes_goes_on_elsewhere(stage: Stage) -> None:
    trial = stage["node lost"]
    causes = trial.ends()
    assert causes == [("node_failure", "requeue"), ("finished", "finish")]
    lost = trial.start(0)["nodes"][1]
    assert lost not in trial.start(1)["nodes"]
    assert has_the_bits_of(trial, stage["reference"])
    stage.cluster.wait_node(lost, "idle", seconds=60)


def test_a_task_of_an_array_requeues_only_itself(stage: Stage) -> None:
    first, last = stage["array"]
    assert stage.states == ["RUNNING", "PENDING"]
    assert first.ends() == [("finished", "finish")]
    assert last.ends() == [("preempted", "requeue"), ("finished", "finish")]
    assert [trial.start(0)["restart_count"] for trial in (first, last)] == [0, 0]
    assert last.start(1)["restart_count"] == 1
    assert [trial.start(0)["job_id"] for trial in (first, last)] == [first.job, last.job]


def test_a_run_that_may_not_be_requeued_submits_its_continuation(stage: Stage) -> None:
    trial = stage["resubmitted"]
    assert trial.ends() == [("preempted", "resubmit"), ("finished", "finish")]
    assert [trial.start(attempt)["job_id"] for attempt in (0, 1)] == [stage.first_job, trial.job]
    assert trial.start(0)["chain"] == trial.start(1)["chain"]
    assert has_the_bits_of(trial, stage["reference"])


def test_a_finished_run_that_comes_back_ends_at_once_and_well(stage: Stage) -> None:
    trial = stage["finished"]
    job = stage.cluster.job(trial.job)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert trial.ends() == [("finished", "finish")]
    assert "the run is already finished" in trial.keeper_log()


def test_a_run_that_dies_at_every_start_is_given_up_with_the_reason(stage: Stage) -> None:
    trial = stage["broken"]
    assert trial.ends() == [("crash", "requeue"), ("crash", "stop")]
    reason = trial.end(1)["reason"]
    assert "2 attempts in a row ended without a new checkpoint" in reason
    assert "ValueError: this job is broken" in reason
    assert wait_for(lambda: stage.cluster.job(trial.job)["JobState"] == "FAILED")
