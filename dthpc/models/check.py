"""What can be wrong with a model's configuration, found without torch on the login node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dthpc.errors import UserError, nearest

GPT_TARGET = "dthpc.models.gpt.GPT"
VIT_TARGET = "dthpc.models.vit.ViT"
CONVNET_TARGET = "dthpc.models.convnet.ConvNet"
TEXT_TARGET = "dthpc.data.text.TextData"
DIGITS_TARGET = "dthpc.data.images.Digits"
TRANSFORMER_SIZES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "max_seq_len")
IMAGE_SIZES = ("image_size", "patch_size", "channels", "classes")
DIGITS = (("image_size", 8, "8x8 pixels"), ("channels", 1, "one channel"), ("classes", 10, "10 classes"))
WORDS = {"norm": ("rms", "layer"), "position": ("rope", "learned"), "mlp": ("swiglu", "gelu")}


def default_hidden(dim: int, mlp: str) -> int:
    """Width of the feed-forward where none is given: 4·dim, or 8/3·dim rounded up to a multiple of 32 for SwiGLU."""
    return 4 * dim if mlp != "swiglu" else -(-8 * dim // 3 // 32) * 32


def check(config: Any) -> list[UserError]:
    """Mistakes in `config.model`, alone and against `config.data` and `config.train.seq_len`.

    Args:
        config: the whole configuration. Models other than this package's are not looked into.
    """
    model = config.model
    data = (config.get("data") or {}).get("_target_")
    errors = _find_wrong_samples(model.get("_target_"), data) or (
        _find_other_images(model) if data == DIGITS_TARGET else []
    )
    if model.get("_target_") not in (GPT_TARGET, VIT_TARGET):
        return errors
    errors += find_mistakes(model)
    seq_len, longest = config.train.seq_len, model.get("max_seq_len")
    if _is_size(seq_len) and _is_size(longest) and seq_len > longest:
        errors.append(
            UserError(
                f"a sequence of {seq_len} tokens is longer than the model's model.max_seq_len={longest}",
                key="train.seq_len",
                value=seq_len,
                instead=f"train.seq_len={longest}, or model.max_seq_len={seq_len}",
            )
        )
    return errors


def _find_wrong_samples(model: str | None, data: str | None) -> list[UserError]:
    """A model that reads tokens given images, or the other way round."""
    if model in (VIT_TARGET, CONVNET_TARGET) and data == TEXT_TARGET:
        why, instead = (
            f"it gives tokens, and the model {model} reads images",
            "data=digits, or a model of text: model=gpt_tiny",
        )
    elif model == GPT_TARGET and data == DIGITS_TARGET:
        why, instead = (
            f"it gives images, and the model {model} reads tokens",
            "model=vit_tiny or model=convnet_small, or data=text",
        )
    else:
        return []
    return [UserError(why, key="data", value=data, instead=instead)]


def _find_other_images(model: Mapping[str, Any]) -> list[UserError]:
    """A model of images that are not those of the handwritten digits."""
    return [
        UserError(f"the digits have {what}", key=f"model.{name}", value=model[name], instead=f"model.{name}={size}")
        for name, size, what in DIGITS
        if _is_size(model.get(name)) and (model[name] < size if name == "classes" else model[name] != size)
    ]


def find_mistakes(fields: Mapping[str, Any]) -> list[UserError]:
    """Mistakes in the fields of a GPT or a ViT; fields that are absent or None are not looked at."""
    errors = _find_bad_values(fields)
    if errors:
        return errors
    dim, heads, kv_heads = (fields.get(name) for name in ("dim", "heads", "kv_heads"))
    if dim and heads and dim % heads:
        fitting = [count for count in range(1, dim + 1) if dim % count == 0]
        closest = min(fitting, key=lambda count: abs(count - heads))
        errors.append(
            UserError(
                f"model.dim={dim} does not divide into {heads} heads (remainder {dim % heads})",
                key="model.heads",
                value=heads,
                instead=f"model.heads={closest}, or model.dim={-(-dim // heads) * heads}",
            )
        )
    elif dim and heads and fields.get("position") == "rope" and dim // heads % 2:
        errors.append(
            UserError(
                f"rotary positions turn pairs, but a head has {dim // heads} values (model.dim={dim} / {heads} heads)",
                key="model.position",
                value="rope",
                instead=f"model.dim={2 * dim}, or model.position=learned",
            )
        )
    if heads and kv_heads and heads % kv_heads:
        closest = max(count for count in range(1, kv_heads + 1) if heads % count == 0)
        errors.append(
            UserError(
                f"model.heads={heads} query heads do not divide among {kv_heads} key/value heads",
                key="model.kv_heads",
                value=kv_heads,
                instead=f"model.kv_heads={closest}",
            )
        )
    return errors + _find_bad_patches(fields.get("image_size"), fields.get("patch_size"))


def _find_bad_patches(image: int | None, patch: int | None) -> list[UserError]:
    if not image or not patch or image % patch == 0:
        return []
    fitting = [size for size in range(1, image + 1) if image % size == 0]
    closest = min(fitting, key=lambda size: abs(size - patch))
    return [
        UserError(
            f"an image of model.image_size={image} pixels a side does not divide into patches of {patch} (remainder "
            f"{image % patch})",
            key="model.patch_size",
            value=patch,
            instead=f"model.patch_size={closest}, or model.image_size={-(-image // patch) * patch}",
        )
    ]


def _find_bad_values(fields: Mapping[str, Any]) -> list[UserError]:
    errors = []
    for name in (*TRANSFORMER_SIZES, *IMAGE_SIZES):
        value = fields.get(name)
        if value is not None and not _is_size(value):
            errors.append(
                UserError(
                    "a size is a whole number of at least 1", key=f"model.{name}", value=value, instead="1 or more"
                )
            )
    for name, words in WORDS.items():
        value = fields.get(name)
        if value is not None and value not in words:
            errors.append(
                UserError("unknown word", key=f"model.{name}", value=value, instead=nearest(str(value), words))
            )
    dropout = fields.get("dropout")
    if dropout is not None and not 0 <= dropout < 1:
        errors.append(
            UserError("a probability below 1 is needed", key="model.dropout", value=dropout, instead="for example 0.1")
        )
    return errors


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
