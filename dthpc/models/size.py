"""Parameters and arithmetic of a model, from its configuration alone (for plans, without torch) or from the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dthpc.models.check import GPT_TARGET, VIT_TARGET, default_hidden

if TYPE_CHECKING:
    from torch import nn


def gpt_parameters(model: Mapping[str, Any], vocab_size: int | None = None) -> int:
    """Number of parameters of a GPT with these fields; a tied embedding counts once."""
    return _matrix_parameters(model, vocab_size) + _lookup_parameters(model, vocab_size)


def gpt_flops_per_token(model: Mapping[str, Any], seq_len: int, vocab_size: int | None = None) -> float:
    """FLOPs of forward and backward for one token: 6N + 12·L·H·Q·T (Chowdhery et al. 2022, "PaLM", App. B).

    N counts the parameters that multiply, so an embedding that is only looked up is left out. As in the source, the
    whole attention square is counted although the causal mask needs half, and recomputation is not counted.
    """
    attention: int = 12 * model["layers"] * model["dim"] * seq_len
    return 6.0 * _matrix_parameters(model, vocab_size) + attention


def vit_flops_per_image(model: Mapping[str, Any], parameters: int) -> float:
    """FLOPs of forward and backward for one image: those of `gpt_flops_per_token` for each patch, and the classifier.

    Args:
        model: the fields.
        parameters: N, all of them; positions do not multiply, and the classifier does so once.
    """
    dim, patches = int(model["dim"]), (model["image_size"] // model["patch_size"]) ** 2
    classifier = (dim + 1) * model["classes"]
    for_each = 6 * (parameters - patches * dim - classifier) + 12 * model["layers"] * dim * patches
    return float(patches * for_each + 6 * classifier)


def flops_per_token(config: Any, parameters: int, vocab_size: int | None) -> float:
    """FLOPs of forward and backward for one target of a run: a GPT's token, a ViT's image, or 6N for other models.

    Args:
        config: the whole configuration.
        parameters: N, of the model as it was built.
        vocab_size: of the data.
    """
    target = config.model.get("_target_")
    if target == VIT_TARGET:
        return vit_flops_per_image(config.model, parameters)
    if target != GPT_TARGET:
        return 6.0 * parameters
    return gpt_flops_per_token(config.model, config.train.seq_len, vocab_size)


def _matrix_parameters(model: Mapping[str, Any], vocab_size: int | None) -> int:
    dim, layers, heads = int(model["dim"]), int(model["layers"]), int(model["heads"])
    vocab: int | None = model.get("vocab_size") or vocab_size
    if vocab is None:
        raise ValueError("the vocabulary's size is known neither from the model nor from the data")
    kv_dim: int = dim // heads * (model.get("kv_heads") or heads)
    mlp = model.get("mlp") or "swiglu"
    hidden: int = model.get("hidden") or default_hidden(dim, mlp)
    attention = 2 * dim * dim + 2 * dim * kv_dim
    feed_forward = (3 if mlp == "swiglu" else 2) * dim * hidden
    norms = 2 * dim
    biases = 0
    if model.get("norm", "rms") == "layer":
        norms = 4 * dim
        biases = 2 * dim + 2 * kv_dim + dim + (2 if mlp == "swiglu" else 1) * hidden
    return layers * (attention + feed_forward + norms + biases) + norms // 2 + vocab * dim


def _lookup_parameters(model: Mapping[str, Any], vocab_size: int | None) -> int:
    vocab = model.get("vocab_size") or vocab_size or 0
    untied = 0 if model.get("tie_embeddings", True) else vocab * model["dim"]
    learned = model["max_seq_len"] * model["dim"] if model.get("position", "rope") == "learned" else 0
    return untied + learned


def count_parameters(model: nn.Module) -> int:
    """Number of parameters of any module, each shared one once."""
    return sum(parameter.numel() for parameter in model.parameters())
