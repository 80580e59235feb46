from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.models.check import check, default_hidden


def messages(seq_len: int = 64, **model: Any) -> list[str]:
    fields = {"_target_": "dthpc.models.gpt.GPT", "dim": 64, "layers": 2, "heads": 4, **model}
    return [e.message() for e in check(OmegaConf.create({"model": fields, "train": {"seq_len": seq_len}}))]


def test_a_good_model_has_no_mistakes() -> None:
    assert messages(kv_heads=2, norm="layer", dropout=0.1, vocab_size=None) == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"heads": 5},
            "model.heads=5: model.dim=64 does not divide into 5 heads (remainder 4). Instead: model.heads=4",
        ),
        ({"kv_heads": 3}, "model.heads=4 query heads do not divide among 3 key/value heads. Instead: model.kv_heads=2"),
        ({"dim": 12, "position": "rope"}, "a head has 3 values"),
        ({"mlp": "swiglo"}, "did you mean swiglu?"),
        ({"layers": 0}, "model.layers=0: a size is a whole number of at least 1"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
    ],
)
def test_each_mistake_is_told_with_its_numbers(model: dict[str, Any], expected: str) -> None:
    found = messages(**model)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"heads": 5}, "model.heads=5: model.dim=64 does not divide into 5 heads (remainder 4)"),
        (
            {"patch_size": 3},
            "model.patch_size=3: an image of model.image_size=8 pixels a side does not divide into patches of 3 "
            "(remainder 2). Instead: model.patch_size=2, or model.image_size=9",
        ),
        ({"patch_size": 9}, "Instead: model.patch_size=8, or model.image_size=9"),
        ({"channels": 0}, "model.channels=0: a size is a whole number of at least 1"),
        ({"classes": -1}, "model.classes=-1: a size"),
        ({"dropout": -0.1}, "model.dropout=-0.1"),
    ],
)
def test_each_mistake_in_a_vision_transformer_is_told(model: dict[str, Any], expected: str) -> None:
    fields = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10, **model}
    found = messages(_target_="dthpc.models.vit.ViT", **fields)
    assert len(found) == 1
    assert expected in found[0]


def test_a_good_vision_transformer_has_no_mistakes() -> None:
    assert messages(_target_="dthpc.models.vit.ViT", image_size=8, patch_size=4, channels=1, classes=10) == []


def test_several_mistakes_are_told_together() -> None:
    assert len(messages(layers=-1, norm="x", dropout=2)) == 3


def test_a_sequence_must_fit_the_model() -> None:
    found = messages(seq_len=128, max_seq_len=100)
    assert len(found) == 1
    assert "train.seq_len=128" in found[0]
    assert "model.max_seq_len=100" in found[0]


def test_models_of_users_are_left_alone() -> None:
    assert messages(_target_="my.Model", heads=5) == []


def test_default_feed_forward_of_both_kinds_has_about_the_same_size() -> None:
    assert default_hidden(128, "gelu") == 512
    assert default_hidden(128, "swiglu") == 352


def test_the_check_does_not_import_torch() -> None:
    code = "import sys, dthpc.models.check, dthpc.models.size, dthpc.parallel.layout, dthpc.parallel.precision as p;"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        ("vit.ViT", "text.TextData", "it gives tokens, and the model dthpc.models.vit.ViT reads images"),
        ("convnet.ConvNet", "text.TextData", "it gives tokens"),
        ("gpt.GPT", "images.Digits", "it gives images, and the model dthpc.models.gpt.GPT reads tokens"),
        ("vit.ViT", "images.Digits", None),
        ("gpt.GPT", "text.TextData", None),
    ],
)
def test_a_model_is_refused_the_kind_of_samples_that_it_cannot_read(
    model: str, data: str, expected: str | None
) -> None:
    config = {
        "model": {"_target_": f"dthpc.models.{model}"},
        "data": {"_target_": f"dthpc.data.{data}"},
        "train": {"seq_len": 64},
    }
    found = [error.message() for error in check(OmegaConf.create(config))]
    assert len(found) == (expected is not None)
    assert expected is None or (expected in found[0] and found[0].startswith("data=dthpc.data."))


@pytest.mark.parametrize(("name", "bad", "good"), [("classes", 9, 12), ("channels", 3, 1), ("image_size", 16, 8)])
def test_a_model_for_other_images_than_the_digits_is_told_what_they_are(name: str, bad: int, good: int) -> None:
    for value in (bad, good):
        model = {"_target_": "dthpc.models.convnet.ConvNet", name: value}
        config = {"model": model, "data": {"_target_": "dthpc.data.images.Digits"}, "train": {"seq_len": 64}}
        found = [error.message() for error in check(OmegaConf.create(config))]
        assert [message.split(":")[0] for message in found] == ([f"model.{name}={bad}"] if value == bad else [])
