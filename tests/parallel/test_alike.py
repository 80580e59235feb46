from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.errors import UserError
from dthpc.parallel.alike import check_alike, check_trainable
from tests.parallel import tasks
from tests.ranks import pool


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


def test_models_that_differ_only_in_values_are_alike() -> None:
    assert pool().run(3, tasks.refusal_of_models, "nothing") == [""] * 3


def test_a_single_process_is_alike() -> None:
    check_alike(nn.Linear(2, 2), None)


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(UserError, match="no parameter to train"):
        check_trainable(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match=r"parameter weight is torch\.bfloat16"):
        check_trainable(nn.Linear(2, 2, dtype=torch.bfloat16))


def test_frozen_parameters_may_have_any_format() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(2, 2))
    check_trainable(model)
