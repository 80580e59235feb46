import functools

import pytest

from tests.proof.cases import Case
from tests.proof.compare import deviation, limit_of
from tests.proof.mistakes import MISTAKES
from tests.ranks import pool


@functools.cache
def clean(layout: str) -> list[str]:
    case = Case.of(layout)
    return deviation(pool(), case).beyond(limit_of(case))


@pytest.mark.parametrize("name", MISTAKES)
def test_the_matrix_finds_a_mistake_and_names_it(name: str) -> None:
    mistake = MISTAKES[name]
    for layout in mistake.layouts:
        case = Case.of(layout)
        assert case.fits
        told = deviation(pool(), case, name).beyond(limit_of(case))
        assert told, f"{case} does not tell that {mistake.told}"
        assert not clean(layout), f"{case} deviates without the mistake"


def test_there_are_mistakes_of_every_kind() -> None:
    assert len(MISTAKES) >= 14
