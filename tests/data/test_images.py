"""The digits: real images, split the same way every time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dthpc.data.images import Digits
from dthpc.errors import UserError


def test_the_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    data, expected = Digits(held_out_every=5), load_digits()
    assert (len(data.train), len(data.valid)) == (1438, 359)
    for split, position, number in ((data.train, 0, 0), (data.valid, 0, 4), (data.train, 4, 5), (data.valid, 3, 19)):
        image, label = split[position]
        assert torch.equal((image[0] + 1) * 8, torch.from_numpy(expected.images[number]).float())
        assert int(label) == expected.target[number]


def test_shapes_types_and_scale() -> None:
    data = Digits()
    image, label = data.train[17]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)
    assert (data.train.images.min().item(), data.train.images.max().item()) == (-1.0, 1.0)
    assert set(data.valid.labels.tolist()) == set(range(data.classes))


def test_the_fingerprint_stands_for_the_split_too() -> None:
    prints = []
    for every in (5, 5, 4):
        data = Digits(every)
        data.prepare()
        prints.append(data.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_nothing_of_scikit_learn_is_imported() -> None:
    code = "import sys; from dthpc.data.images import Digits; len(Digits().train); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_split_without_training_images_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.held_out_every=1"):
        Digits(1).prepare()
