"""Random numbers of a step as a function of (seed, step, rank): whatever was drawn before does not matter."""

from __future__ import annotations

import random
import sys

import torch

from dthpc.models.init import named_seed


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch, Python and NumPy for one step of one rank.

    So a step can be given up half-way and made again after a restart, and what a callback draws changes no training.
    Much cheaper than `torch.manual_seed`, which asks every kind of device.
    """
    value = named_seed(seed, "step", step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value & 0xFFFFFFFF)
