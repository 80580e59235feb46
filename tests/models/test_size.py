from __future__ import annotations

import itertools

import pytest
from omegaconf import OmegaConf

from dthpc.models.gpt import GPT
from dthpc.models.size import count_parameters, flops_per_token, gpt_flops_per_token, gpt_parameters


@pytest.mark.parametrize(
    ("norm", "position", "mlp", "tied"),
    list(itertools.product(("rms", "layer"), ("rope", "learned"), ("swiglu", "gelu"), (True, False))),
)
def test_counted_parameters_are_those_of_the_module(norm: str, position: str, mlp: str, tied: bool) -> None:
    fields = {
        "dim": 24,
        "layers": 3,
        "heads": 6,
        "kv_heads": 2,
        "max_seq_len": 10,
        "norm": norm,
        "position": position,
        "mlp": mlp,
        "tie_embeddings": tied,
    }
    assert gpt_parameters(fields, vocab_size=31) == count_parameters(GPT(vocab_size=31, **fields))  # type: ignore[arg-type]


def test_flops_of_gpt_3_are_those_of_the_formula() -> None:
    # 175 B: 96 layers of width 12288, two-matrix feed-forward; N without the looked-up positions is 174.6e9.
    fields = {"dim": 12288, "layers": 96, "heads": 96, "max_seq_len": 2048, "norm": "layer", "position": "learned"}
    fields |= {"mlp": "gelu", "tie_embeddings": True, "vocab_size": 50257}
    multiplying = gpt_parameters(fields) - 2048 * 12288
    assert multiplying == pytest.approx(174.6e9, rel=1e-3)
    assert gpt_flops_per_token(fields, 2048) == 6 * multiplying + 12 * 96 * 12288 * 2048


def test_an_unknown_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        gpt_parameters({"dim": 8, "layers": 1, "heads": 1})


def test_other_models_count_six_a_parameter() -> None:
    model = {"_target_": "dthpc.models.gpt.GPT", "dim": 8, "layers": 1, "heads": 2, "mlp": "gelu"}
    config = OmegaConf.create({"model": model, "train": {"seq_len": 16}})
    assert flops_per_token(config, 1000, 32) == gpt_flops_per_token(model, 16, 32)
    config.model = {"_target_": "dthpc.models.vit.ViT", "dim": 8, "layers": 1, "image_size": 8, "patch_size": 4}
    config.model.classes = 10
    # 4 patches; 1000 parameters, of which 32 are positions and 90 the classifier.
    assert flops_per_token(config, 1000, None) == 4 * (6 * 878 + 12 * 8 * 4) + 6 * 90
    config.model["_target_"] = "my.Model"
    assert flops_per_token(config, 1000, None) == 6000
