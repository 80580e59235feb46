import math

import pytest
import torch

from tests.proof.cases import Case
from tests.proof.compare import LIMITS, Deviation, alone, compare
from tests.proof.reference import Trained


def trained(loss: float = 2.0, norm: float = 1.0, weight: float = 3.0, bias: float = 0.0) -> Trained:
    parameters = {"weight": torch.tensor([[1.0, weight]]), "bias": torch.tensor([bias])}
    return Trained([loss, 1.5], [norm, 0.5], parameters, held_out=1.0)


def test_equal_trainings_do_not_deviate() -> None:
    assert compare(trained(), trained()) == Deviation(0.0, 0.0, 0.0, "weight")


def test_each_number_is_relative_to_its_own_size() -> None:
    found = compare(trained(loss=2.002, norm=1.01, weight=3.3), trained())
    assert found.loss == pytest.approx(0.001)
    assert found.norm == pytest.approx(0.01)
    assert found.parameters == pytest.approx(0.1)
    assert found.worst == "weight"


def test_a_parameter_that_is_zero_is_measured_by_how_far_steps_move_it() -> None:
    found = compare(trained(bias=0.0001), trained())
    assert found.worst == "bias"
    assert found.parameters == pytest.approx(0.0001 / 0.0305)


def test_the_held_out_loss_counts() -> None:
    other = trained()
    other.held_out = 1.1
    assert compare(other, trained()).loss == pytest.approx(0.1)


def test_what_is_beyond_a_limit_is_named() -> None:
    limit = Deviation(1e-3, 1e-3, 1e-3)
    assert Deviation(1e-4, 1e-4, 1e-4, "head.weight").within(limit)
    told = Deviation(1e-4, 0.2, 0.5, "head.weight").beyond(limit)
    assert told == [
        "norm deviates by 2.0e-01, and the limit is 1e-03",
        "parameters deviates by 5.0e-01, and the limit is 1e-03, most of all in head.weight",
    ]


@pytest.mark.parametrize("field", ["loss", "norm", "weight"])
def test_what_is_not_a_number_is_beyond_every_limit(field: str) -> None:
    assert not compare(trained(**{field: math.nan}), trained()).within(Deviation(1e9, 1e9, 1e9))


def test_norms_that_both_overflow_are_equal_and_one_alone_is_not() -> None:
    assert compare(trained(norm=math.nan), trained(norm=math.inf)).norm == 0.0
    assert compare(trained(norm=1.0), trained(norm=math.inf)).norm == math.inf
    assert compare(trained(norm=math.inf), trained(norm=1.0)).norm == math.inf


def test_missing_steps_parameters_and_other_shapes_are_infinitely_far() -> None:
    short, lacking, other = trained(), trained(), trained()
    short.losses.pop()
    del lacking.parameters["bias"]
    other.parameters["bias"] = torch.zeros(2)
    assert compare(short, trained()).loss == math.inf
    assert "bias" in compare(lacking, trained()).worst
    assert compare(other, trained()).parameters == math.inf


def test_ranks_that_tell_other_numbers_are_named_however_little_they_differ() -> None:
    first = trained()
    first.others = [trained(), trained(loss=math.nextafter(2.0, 3.0))]
    assert compare(first, trained()).beyond(LIMITS["fp32"]) == ["ranks 2 tell other numbers than rank 0"]


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_limits_of_16_bits_are_what_the_format_itself_makes_of_one_process(format: str) -> None:
    settings = ("", "classic", "odd", "tied", "dropout", "classic dropout odd")
    found = [compare(alone(Case.of(f"{words} {format}")), alone(Case.of(words))) for words in settings]
    for what in ("loss", "norm", "parameters"):
        measured, limit = max(getattr(each, what) for each in found), getattr(LIMITS[format], what)
        assert measured <= limit <= 16 * measured
