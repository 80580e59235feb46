"""A few steps of training in one process, for tests of models."""

from __future__ import annotations

import torch
from torch import nn

from dthpc.data.images import Digits
from dthpc.models.init import init_parameters
from dthpc.models.losses import next_token


def train_on_digits(model: nn.Module, steps: int, lr: float) -> float:
    """Train on batches of 64 digits; returns the share of the held-out ones that the model tells right."""
    init_parameters(model, 1)
    data = Digits()
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0)).repeat(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(steps):
        rows = order[64 * step : 64 * (step + 1)]
        total, count = next_token(model(data.train.images[rows]), data.train.labels[rows])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = model(data.valid.images).argmax(-1) == data.valid.labels
    return right.float().mean().item()
