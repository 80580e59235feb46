from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.proof.cases import Case
from tests.proof.compare import Deviation, alone, compare, limit_of
from tests.proof.transitions import (
    AGAIN,
    TRANSITIONS,
    change_layout,
    interrupted,
    samples_again,
    sides,
    state_displaced,
    state_forgotten,
)
from tests.ranks import pool


def beyond(transition: str, mistake: Callable[[], Any] | None = None) -> list[str]:
    before, after = sides(transition)
    found = compare(change_layout(pool(), before, after, mistake), alone(after))
    one, other = limit_of(before), limit_of(after)
    limit = Deviation(max(one.loss, other.loss), max(one.norm, other.norm), max(one.parameters, other.parameters))
    return found.beyond(limit)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_run_that_goes_on_in_another_layout_trains_the_same_model(transition: str) -> None:
    told = beyond(transition)
    assert not told, f"{transition}: {'; '.join(told)}"


@pytest.mark.parametrize("words", AGAIN)
def test_a_run_that_goes_on_in_the_same_layout_is_the_one_that_was_never_stopped(words: str) -> None:
    case = Case.of(words)
    (told, tensors), (expected, whole) = (interrupted(pool(), case, stops) for stops in (True, False))
    assert repr((told.losses, told.norms, told.held_out)) == repr((expected.losses, expected.norms, expected.held_out))
    assert tensors.keys() == whole.keys()
    assert any(key.startswith("optim.") for key in tensors)
    different = [key for key, tensor in tensors.items() if not torch.equal(tensor, whole[key])]
    assert not different, f"{case}: {', '.join(different[:5])} differ"


@pytest.mark.parametrize("mistake", [state_forgotten, state_displaced, samples_again])
@pytest.mark.parametrize("transition", ["zero1 > zero2", "tp > zero3", "1f1b > zero1 tp"])
def test_mistakes_of_going_on_are_found(transition: str, mistake: Callable[[], Any]) -> None:
    assert beyond(transition, mistake), f"{transition} does not tell: {mistake.__doc__}"
