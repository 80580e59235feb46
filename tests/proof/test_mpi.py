"""Layouts over MPI: the job, the mesh, the checkpoint and everything else on the process group over mpi4py."""

import pytest

from tests.proof.__main__ import pool_of
from tests.proof.cases import Case, cases_over_mpi, chosen_cases, covered
from tests.proof.compare import deviation, limit_of


@pytest.mark.parametrize("case", cases_over_mpi(), ids=str)
def test_a_layout_trains_the_same_model_over_mpi(case: Case) -> None:
    beyond = deviation(pool_of("mpi"), case).beyond(limit_of(case))
    assert not beyond, f"{case} ({case.ranks} ranks): {'; '.join(beyond)}"


def test_these_layouts_have_every_feature_and_most_pairs() -> None:
    cases = cases_over_mpi()
    assert len(set(cases)) == len(cases) >= 40
    every = {feature for case in chosen_cases() if case.ranks > 1 for feature in case.features}
    assert {feature for case in cases for feature in case.features} == every
    found, there = covered(cases, 2)
    assert found > 0.7 * there
