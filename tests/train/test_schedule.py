from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.train.schedule import check, learning_rate, peak_rate, ratio

TRAIN = OmegaConf.create({"steps": 10, "global_batch": 16})


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_linear_and_ends_at_the_peak(name: str) -> None:
    rates = [ratio(step, 100, name=name, warmup_steps=10) for step in range(11)]
    assert rates == pytest.approx([0.1 * (step + 1) for step in range(10)] + [1.0])


def test_values_between_start_and_end() -> None:
    assert ratio(60, 110, name="cosine", warmup_steps=10, min_ratio=0.2) == pytest.approx(0.6)
    assert ratio(35, 110, name="cosine", warmup_steps=10, min_ratio=0.0) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )
    assert ratio(60, 110, name="linear", warmup_steps=10, min_ratio=0.2) == pytest.approx(0.6)
    assert ratio(109, 110, name="constant", warmup_steps=10) == 1.0
    wsd = [ratio(step, 100, name="wsd", warmup_steps=0, min_ratio=0.0, decay_fraction=0.2) for step in (0, 79, 80, 90)]
    assert wsd == pytest.approx([1.0, 1.0, 1.0, 0.5])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_decay_never_rises_and_ends_at_the_minimum(name: str) -> None:
    rates = [ratio(step, 50, name=name, warmup_steps=5, min_ratio=0.1) for step in range(5, 51)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert ratio(80, 50, name=name, min_ratio=0.1) == pytest.approx(0.1)


def test_the_rate_scales_the_peak_of_the_configuration() -> None:
    schedule = {"name": "constant", "warmup_steps": 4, "min_ratio": 0.1, "decay_fraction": 0.2}
    optim = OmegaConf.create({"lr": 0.02, "schedule": schedule})
    assert learning_rate(optim, TRAIN)(1) == pytest.approx(0.01)


def test_a_warm_up_as_long_as_the_run_is_no_division_by_zero() -> None:
    assert ratio(9, 10, name="cosine", warmup_steps=10) == 1.0
    assert 0 < ratio(10, 10, name="cosine", warmup_steps=10) <= 1


def test_a_warm_up_that_is_not_given_follows_the_length_of_the_run() -> None:
    assert [ratio(step, 100, name="constant") for step in (0, 3, 4)] == pytest.approx([0.2, 0.8, 1.0])
    assert ratio(1998, 1_000_000, name="constant") == pytest.approx(1999 / 2000)
    assert ratio(0, 5, name="constant") == 1.0


def scaled(**fields: Any) -> Any:
    return OmegaConf.create({"lr": 0.1, "scale_lr": None, "base_batch": None, **fields})


def test_the_peak_follows_the_batch_size_by_the_rule() -> None:
    """Goyal et al. 2017, section 2.1: 0.1 for 256 samples is 3.2 for 8192."""
    assert peak_rate(scaled(scale_lr="linear", base_batch=256), 8192) == pytest.approx(3.2)
    assert peak_rate(scaled(scale_lr="linear", base_batch=256), 64) == pytest.approx(0.025)
    assert peak_rate(scaled(scale_lr="sqrt", base_batch=64), 1024) == pytest.approx(0.4)
    assert peak_rate(scaled(), 8192) == 0.1


def test_the_schedule_is_a_fraction_of_the_scaled_peak() -> None:
    schedule = {"name": "constant", "warmup_steps": 4, "min_ratio": 0.1, "decay_fraction": 0.2}
    optim = scaled(scale_lr="linear", base_batch=8, schedule=schedule)
    assert [learning_rate(optim, TRAIN)(step) for step in (1, 5)] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale_lr": "linaer", "base_batch": 8}, "optim.scale_lr=linaer: no such rule. Instead: did you mean linear?"),
        ({"scale_lr": "linear"}, "optim.scale_lr=linear: the rate follows .* Instead: optim.base_batch=32 beside it"),
        ({"base_batch": 8}, "optim.base_batch=8: the rate follows .* Instead: optim.scale_lr=linear"),
        ({"scale_lr": "sqrt", "base_batch": 0}, "optim.base_batch=0: a batch has at least 1 sample"),
    ],
)
def test_mistakes_in_scaling_are_told(fields: dict[str, Any], words: str) -> None:
    (error,) = check(OmegaConf.create({"optim": scaled(**fields), "train": {"global_batch": 32}}))
    with pytest.raises(type(error), match=words):
        raise error


@pytest.mark.parametrize("fields", [{}, {"scale_lr": "linear", "base_batch": 8}, {"scale_lr": "sqrt", "base_batch": 1}])
def test_right_scalings_pass(fields: dict[str, Any]) -> None:
    assert check(OmegaConf.create({"optim": scaled(**fields), "train": {"global_batch": 32}})) == []
