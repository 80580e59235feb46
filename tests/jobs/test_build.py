from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.jobs.build import SplitData, build_data, build_loss, find_target, instantiate
from dthpc.models.losses import next_token


def test_defaults_fill_what_is_left_out_or_null_and_what_the_target_takes() -> None:
    node = OmegaConf.create({"_target_": "tests.jobs.tasks.Perceptron", "width": 3})
    assert instantiate(node, "model", classes=5, vocab_size=9).outer.out_features == 5
    node.classes = 4
    assert instantiate(node, "model", classes=5).outer.out_features == 4
    node.classes = None
    assert instantiate(node, "model", classes=5).outer.out_features == 5


def test_a_plain_data_set_is_split_so_that_each_sample_is_in_one_part() -> None:
    split = SplitData(list(range(45)))
    train, valid = ([part[i] for i in range(len(part))] for part in (split.train, split.valid))
    assert valid == [19, 39]
    assert sorted(train + valid) == list(range(45))


def test_data_with_its_own_parts_is_taken_as_it_is() -> None:
    data = build_data(OmegaConf.create({"_target_": "tests.train.tasks.Sequences"}))
    assert (len(data.train), len(data.valid)) == (40, 7)


def test_a_loss_without_options_is_the_function_itself() -> None:
    assert build_loss(OmegaConf.create({"_target_": "dthpc.models.losses.next_token"})) is next_token
    loss = build_loss(OmegaConf.create({"_target_": "tests.jobs.tasks.scaled", "scale": 2.0}))
    total, count = loss(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    assert (round(total.item(), 4), int(count)) == (8.3178, 3)


def test_a_missing_target_is_named() -> None:
    with pytest.raises(UserError, match=r"job\._target_: names nothing"):
        find_target(OmegaConf.create({}), "job")
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        find_target(OmegaConf.create({"_target_": "nowhere.Thing"}), "model")
