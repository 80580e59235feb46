from __future__ import annotations

import json
import math

import pytest
import torch
from omegaconf import OmegaConf

from dthpc.parallel.scaler import LARGEST_SCALE, SMALLEST_SCALE, LossScaler, make_scaler


def follow(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: `.` is a clean one, `!` an overflow."""
    scales = []
    for step in steps:
        assert scaler.update(step == ".") == (step == ".")
        scales.append(scaler.scale)
    return scales


def test_it_doubles_after_clean_steps_and_halves_at_an_overflow_which_starts_the_count_anew() -> None:
    scaler = LossScaler(scale=8.0, growth_every=3)
    assert follow(scaler, "...!..!...") == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8]
    assert (scaler.skipped, scaler.overflows) == (2, 2)


def test_it_follows_torchs_own_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    ours = LossScaler(scale=1024.0, growth_every=4)
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    for step in ".....!!....!.........":
        theirs.scale(weight.sum())
        weight.grad = torch.tensor([1.0 if step == "." else math.inf])
        theirs.step(sgd)
        theirs.update()
        ours.update(step == ".")
        assert ours.scale == theirs.get_scale()


def test_scales_stay_powers_of_two_within_bounds() -> None:
    scaler = LossScaler(scale=LARGEST_SCALE / 2, growth_every=1)
    assert follow(scaler, "...") == [LARGEST_SCALE] * 3
    scales = follow(scaler, "!" * 38)
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales)
    assert scales[-1] == SMALLEST_SCALE


def test_overflow_at_the_smallest_scale_is_an_error_that_names_the_loss() -> None:
    scaler = LossScaler(scale=SMALLEST_SCALE)
    with pytest.raises(FloatingPointError, match=r"smallest loss scale of 6.10352e-05, so it is the loss"):
        scaler.update(False)


def test_a_restored_scaler_goes_on_like_the_one_that_was_saved() -> None:
    first = LossScaler(scale=2.0, growth_every=3)
    follow(first, "..!..")
    assert first.scale == 1.0
    second = LossScaler(scale=64.0, growth_every=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert follow(second, ".!..") == follow(first, ".!..")
    assert second == first


def test_without_fp16_the_scale_is_one_and_stays() -> None:
    scaler = make_scaler(OmegaConf.create({"compute": "bf16", "loss_scale": 64.0, "loss_scale_growth_every": 1}))
    assert follow(scaler, "..!!.") == [1.0] * 5
    assert (scaler.skipped, scaler.overflows) == (0, 2)


def test_a_change_of_format_takes_no_scale_over() -> None:
    fp16 = make_scaler(OmegaConf.create({"compute": "fp16", "loss_scale": 64.0, "loss_scale_growth_every": 5}))
    bf16 = make_scaler(OmegaConf.create({"compute": "bf16"}))
    fp16.load_state_dict(bf16.state_dict())
    assert fp16.scale == 64.0
    bf16.load_state_dict(fp16.state_dict())
    assert bf16.scale == 1.0
