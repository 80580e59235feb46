from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.parallel.check import check

GPT = {"_target_": "dthpc.models.gpt.GPT", "dim": 64, "layers": 6, "heads": 8, "kv_heads": 4, "vocab_size": 101}
VIT = {"_target_": "dthpc.models.vit.ViT", "image_size": 12, "patch_size": 4, "dim": 64, "layers": 4, "heads": 4}


def messages(model: dict[str, Any], ranks: int = 12, seq_len: int = 64, **parallel: Any) -> list[str]:
    train = {"global_batch": 240, "micro_batch": None, "seq_len": seq_len}
    config = OmegaConf.create({"parallel": parallel, "train": train, "model": model})
    return [error.message() for error in check(config, ranks)]


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT, {"tp": 4, "sequence_parallel": True, "ranks": 8}),
        (GPT, {"pp": 6}),
        (GPT, {"pp": 3, "stages": [1, 2, 3]}),
        (GPT, {"sequence_parallel": True, "seq_len": 63}),
        (VIT, {"tp": 4}),
        (VIT, {"pp": 2, "tp": 2}),
        ({"_target_": "dthpc.models.convnet.ConvNet"}, {"zero": 3}),
        ({"_target_": "my.Model", "heads": 5, "layers": 1}, {"tp": 2, "pp": 2}),
    ],
)
def test_models_that_can_be_cut_are_let_pass(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert messages(model, **parallel) == []


@pytest.mark.parametrize(
    ("model", "parallel", "expected"),
    [
        (
            {**GPT, "kv_heads": None},
            {"tp": 3},
            "model.heads=8 attention heads do not divide among 3 tensor-parallel ranks (remainder 2). Instead: "
            "parallel.tp=2, or model.heads=9",
        ),
        (GPT, {"tp": 8, "ranks": 8}, "model.kv_heads=4 key/value heads do not divide among 8 tensor-parallel ranks"),
        ({**GPT, "hidden": 3}, {"tp": 4}, "model.hidden=3 columns of the feed-forward layers leave 1 of 4"),
        ({**GPT, "vocab_size": 2}, {"tp": 4}, "model.vocab_size=2 rows of the vocabulary leave 2 of 4"),
        (
            GPT,
            {"tp": 4, "sequence_parallel": True, "seq_len": 63},
            "train.seq_len=63: the 63 tokens of a sequence do not divide among parallel.tp=4 ranks (remainder 3)",
        ),
        (
            VIT,
            {"tp": 2, "sequence_parallel": True},
            "model.patch_size=4: the 9 patches of an image (model.image_size=12) do not divide among parallel.tp=2",
        ),
        (
            {**GPT, "layers": 3},
            {"pp": 4},
            "model.layers=3 layers are fewer than the 4 stages of the pipeline (pp=4, chunks=1). Instead: "
            "parallel.pp=3 or less, or model.layers=4 or more",
        ),
        (GPT, {"pp": 4, "schedule": "interleaved"}, "fewer than the 8 stages of the pipeline (pp=4, chunks=2)"),
        (GPT, {"pp": 2, "stages": [2, 3]}, "parallel.stages=[2,3]: its numbers add up to 5, but model.layers=6"),
        ({"_target_": "dthpc.models.convnet.ConvNet"}, {"tp": 2}, "parallel.tp=2: the convolutional net has no tensor"),
        ({"_target_": "dthpc.models.convnet.ConvNet"}, {"pp": 2}, "parallel.pp=2: the convolutional net has no pipel"),
    ],
)
def test_what_can_not_be_cut_is_told_with_the_numbers(
    model: dict[str, Any], parallel: dict[str, Any], expected: str
) -> None:
    found = messages(model, **parallel)
    assert len(found) == 1, found
    assert expected in found[0]


def test_heads_of_both_kinds_are_told_together() -> None:
    assert len(messages(GPT, tp=3)) == 2


def test_malformed_sizes_are_left_to_the_models_own_check() -> None:
    broken = {**GPT, "heads": 0, "layers": "many", "vocab_size": -1, "hidden": None}
    assert messages(broken, tp=2, pp=2) == []
    assert messages({**VIT, "patch_size": 5}, tp=2, sequence_parallel=True) == []
