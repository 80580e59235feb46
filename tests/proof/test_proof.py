import pytest

from tests.proof.cases import Case, all_cases, chosen_cases, covered
from tests.proof.compare import deviation, limit_of
from tests.ranks import pool


@pytest.mark.parametrize("case", chosen_cases(), ids=str)
def test_a_layout_trains_the_same_model_as_one_process(case: Case) -> None:
    beyond = deviation(pool(), case).beyond(limit_of(case))
    assert not beyond, f"{case} ({case.ranks} ranks): {'; '.join(beyond)}"


def test_the_layouts_of_every_run_have_all_pairs_of_features_and_most_triples() -> None:
    cases = chosen_cases()
    assert len(set(cases)) == len(cases) >= 230
    assert len({(case.ranks, *sorted(case.overrides)) for case in cases}) > 200
    found, there = covered(cases, 2)
    assert found == there
    found, there = covered(cases, 3)
    assert found > 0.8 * there


def test_all_layouts_are_those_that_fit() -> None:
    every = {case.features for case in all_cases()}
    assert ("dp", "tp", "1f1b") in every
    assert ("zero3", "parameters") in every
    assert ("zero1", "parameters") not in every, "nothing of the parameters is sharded"
    assert ("dp", "zero1") not in every, "two kinds of data parallelism"
    assert ("hsdp", "tp", "gpipe", "reorder") not in every, "16 ranks"
    assert all(len(features) <= 3 for features in every)
