from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.errors import UserError
from dthpc.models.gpt import GPT
from dthpc.parallel.apply import _check_parameters, persistent_buffers
from tests.parallel import tasks
from tests.ranks import pool


def test_replicas_start_equal_and_their_buffers_stay_equal() -> None:
    first, second = pool().run(2, tasks.weights_after_parallelize)
    assert len(first) == 7
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(UserError, match="no parameter to train"):
        _check_parameters(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match=r"parameter weight is torch\.bfloat16"):
        _check_parameters(nn.Linear(2, 2, dtype=torch.bfloat16))


def test_only_buffers_that_are_saved_are_kept_in_step() -> None:
    assert persistent_buffers(GPT(vocab_size=8, dim=8, layers=1, heads=2)) == []
    assert len(persistent_buffers(nn.BatchNorm1d(3))) == 3
