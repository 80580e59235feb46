from __future__ import annotations

import re
from pathlib import Path

import pytest

from dthpc.comm.tune import SIZES
from dthpc.monitor.units import size as in_bytes
from dthpc.rundir import RunDir
from tests.comm import launched, tune_tasks
from tests.mpi_installations import FAMILIES
from tests.ranks import pool


def times_of(told: str) -> dict[str, list[float]]:
    """Microseconds at each size, by library."""
    head, _, tail = told.partition(": ")
    assert head == f"all-reduce of {', '.join(map(in_bytes, SIZES))}"
    words = [part.split(" ", 1) for part in tail.split("; ")]
    times = {name: [float(each) for each in re.findall(r"(\d+) µs", figures)] for name, figures in words}
    assert all(len(each) == len(SIZES) for each in times.values())
    return times


def scores_of(times: dict[str, list[float]]) -> dict[str, float]:
    """Of each library the sum of its times, each relative to the best at its size."""
    best = [max(min(column), 1.0) for column in zip(*times.values(), strict=True)]
    return {name: sum(t / b for t, b in zip(each, best, strict=True)) for name, each in times.items()}


@pytest.mark.parametrize("names", [["gloo", "slow"], ["slow", "gloo"]])
@pytest.mark.parametrize("sleeper", [None, 1])
def test_the_slower_library_is_not_taken_whatever_the_order_and_whichever_rank_is_slow(
    names: list[str], sleeper: int | None, tmp_path: Path
) -> None:
    answers = pool().run(3, tune_tasks.decide, str(tmp_path), names, sleeper)
    assert answers == [answers[0]] * 3
    winner, told = answers[0]
    assert winner == "gloo"
    times = times_of(told)
    assert list(times) == names
    assert min(times["slow"]) >= tune_tasks.NAP_S * 1e6  # of the slowest rank


def test_the_measurement_leaves_no_group_behind(tmp_path: Path) -> None:
    assert pool().run(2, tune_tasks.is_initialized_after, str(tmp_path)) == [False, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_mpi_started_take_what_measures_fastest_and_say_so(family: str, tmp_path: Path) -> None:
    RunDir(tmp_path).attempt(0).path.mkdir(parents=True)
    found = launched.start(tmp_path, family, 2, comm={"tune": True})
    assert [one.get("error") for one in found] == [None, None]
    assert [one["sum"] for one in found] == [3.0, 3.0]
    (reason,) = {one["backend_reason"] for one in found}
    said = re.fullmatch(r"(gloo|mpi) measured fastest \(comm\.tune\): (.*)", reason)
    assert said is not None, reason
    times = times_of(said[2])
    assert set(times) == {"gloo", "mpi"}
    scores = scores_of(times)
    assert scores[said[1]] <= 1.02 * min(scores.values())  # figures are told in whole microseconds
    assert {one["backend"] for one in found} == {"cpu:mpi4py" if said[1] == "mpi" else "gloo"}
