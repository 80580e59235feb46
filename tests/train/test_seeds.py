from __future__ import annotations

import random

import numpy as np
import torch

from dthpc.train.seeds import seed_step


def draws(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank, torch.device("cpu"))
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_a_steps_numbers_depend_on_seed_step_and_rank_alone() -> None:
    reference = draws(1, 2, 3)
    torch.rand(7)
    assert draws(1, 2, 3) == reference
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert all(a != b for a, b in zip(draws(*other), reference, strict=True))
