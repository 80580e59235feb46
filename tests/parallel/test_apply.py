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


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "where rank 0 has 0.weight [4, 3] torch.float32, rank 2 has 0.weight [5, 3] torch.float32"),
        ("name", "where rank 0 has 0.weight [4, 3] torch.float32, rank 2 has own.weight [4, 3] torch.float32"),
        ("more", "where rank 0 has nothing, rank 2 has 1.weight [4, 4] torch.float32"),
        ("dtype", "where rank 0 has seen [1] torch.int64, rank 2 has seen [1] torch.float32"),
    ],
)
def test_a_model_that_differs_on_one_rank_is_told_by_all(how: str, words: str) -> None:
    texts = pool().run(3, tasks.refusal_of_models, how)
    assert len(set(texts)) == 1
    assert texts[0].startswith("model._target_=Sequential: the ranks build different models: ")
    assert words in texts[0]


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(UserError, match="no parameter to train"):
        _check_parameters(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match=r"parameter weight is torch\.bfloat16"):
        _check_parameters(nn.Linear(2, 2, dtype=torch.bfloat16))


def test_only_buffers_that_are_saved_are_kept_in_step() -> None:
    assert persistent_buffers(GPT(vocab_size=8, dim=8, layers=1, heads=2)) == []
    assert len(persistent_buffers(nn.BatchNorm1d(3))) == 3
