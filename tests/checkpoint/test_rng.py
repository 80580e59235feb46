from __future__ import annotations

import random

import numpy as np
import torch

from dthpc.checkpoint import rng
from tests.checkpoint.jobs import draws


def test_capturing_draws_nothing_and_applying_brings_every_generator_back() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    random_state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    captured = rng.capture()
    assert random.getstate() == random_state
    assert (np.random.get_state()[1] == numpy_state).all()
    expected = (random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist(), draws())
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        room = rng.empty(captured.shape)
        room.copy_(captured)
        rng.apply(room)
        assert (random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist(), draws()) == expected


def test_a_new_stream_depends_on_the_captured_one_and_on_the_rank_only() -> None:
    first = rng.capture()
    torch.rand(1)
    second = rng.capture()
    drawn = []
    for captured, rank in ((first, 0), (first, 1), (second, 0), (first, 0)):
        torch.rand(7)
        rng.reseed(captured, rank)
        drawn.append(draws())
    assert drawn[3] == drawn[0]
    assert len({value for draw in drawn[:3] for value in draw}) == 9
