"""Whether this package's models can be cut as a layout asks, from their configuration alone; free of torch.

A model of somebody else says only when it is built what can be cut: that is checked on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dthpc.config.parallel import ParallelConfig
from dthpc.errors import UserError
from dthpc.models.check import CONVNET_TARGET, GPT_TARGET, VIT_TARGET, default_hidden
from dthpc.parallel.combinations import value_at
from dthpc.parallel.pipeline.names import chunks_of


def check_model(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    """Sizes of `config.model` that the degrees must divide, or must not exceed.

    Args:
        parallel: the layout, whose single values are in their ranges.
        config: the whole configuration.
    """
    model = config.get("model")
    target = model.get("_target_") if model is not None else None
    if target == CONVNET_TARGET:
        yield from _uncuttable(parallel)
    if target not in (GPT_TARGET, VIT_TARGET):
        return
    if parallel.tp > 1:
        yield from _heads(parallel.tp, model)
        yield from _widths(parallel.tp, model)
        if parallel.sequence_parallel:
            yield from _sequence(parallel.tp, config)
    if parallel.pp > 1:
        yield from _layers(parallel, model)


def _uncuttable(parallel: ParallelConfig) -> Iterator[UserError]:
    for axis, words in (("tp", "tensor plan"), ("pp", "pipeline cuts")):
        degree = getattr(parallel, axis)
        if degree > 1:
            yield UserError(
                f"the convolutional net has no {words}: it trains with data parallelism and ZeRO",
                key=f"parallel.{axis}",
                value=degree,
                instead=f"parallel.{axis}=1, and parallel.zero=1, 2 or 3 to share its states among the ranks",
            )


def _heads(tp: int, model: Any) -> Iterator[UserError]:
    """Heads stay whole, so that attention needs no exchange between its matrices."""
    heads, kv_heads = _size(model, "heads"), _size(model, "kv_heads")
    both = math.gcd(heads or 0, kv_heads or 0)
    for name, count, words in (("heads", heads, "attention heads"), ("kv_heads", kv_heads, "key/value heads")):
        if count and count % tp:
            smaller = max(degree for degree in range(1, tp) if both % degree == 0)
            yield UserError(
                f"model.{name}={count} {words} do not divide among {tp} tensor-parallel ranks (remainder {count % tp})",
                key="parallel.tp",
                value=tp,
                instead=f"parallel.tp={smaller}, or model.{name}={-(-count // tp) * tp}",
            )


def _widths(tp: int, model: Any) -> Iterator[UserError]:
    """Widths and vocabularies are split unevenly where they do not divide; a rank needs at least one of each."""
    dim, hidden = _size(model, "dim"), _size(model, "hidden")
    if hidden is None and dim is not None:
        hidden = default_hidden(dim, model.get("mlp") or ("swiglu" if model.get("_target_") == GPT_TARGET else "gelu"))
    for name, size, words in (
        ("hidden", hidden, "columns of the feed-forward layers"),
        ("vocab_size", _size(model, "vocab_size"), "rows of the vocabulary"),
    ):
        if size and size < tp:
            yield UserError(
                f"model.{name}={size} {words} leave {tp - size} of {tp} tensor-parallel ranks without any",
                key="parallel.tp",
                value=tp,
                instead=f"parallel.tp={size} or less, or model.{name}={tp} or more",
            )


def _sequence(tp: int, config: Any) -> Iterator[UserError]:
    model = config.model
    if model.get("_target_") == VIT_TARGET:
        image, patch = _size(model, "image_size"), _size(model, "patch_size")
        if image is None or patch is None or image % patch:
            return  # Told by the model's own check.
        key, value, length = "model.patch_size", patch, (image // patch) ** 2
        told, longer = f"the {length} patches of an image (model.image_size={image}) do", ""
    else:
        length = int(value_at(config, "train.seq_len") or 0)
        key, value, told = "train.seq_len", length, f"the {length} tokens of a sequence do"
        longer = f"train.seq_len={-(-length // tp) * tp}, or "
    if length % tp:
        yield UserError(
            f"{told} not divide among parallel.tp={tp} ranks (remainder {length % tp}), as sequence parallelism needs",
            key=key,
            value=value,
            instead=f"{longer}parallel.sequence_parallel=false",
        )


def _layers(parallel: ParallelConfig, model: Any) -> Iterator[UserError]:
    layers = _size(model, "layers")
    if layers is None:
        return
    chunks = chunks_of(parallel.schedule, parallel.chunks)
    stages = parallel.pp * chunks
    if layers < stages:
        fitting = layers // chunks
        smaller = f"parallel.pp={fitting} or less, or " if fitting else "fewer chunks, or "
        yield UserError(
            f"model.layers={layers} layers are fewer than the {stages} stages of the pipeline (pp={parallel.pp}, "
            f"chunks={chunks})",
            key="parallel.pp",
            value=parallel.pp,
            instead=f"{smaller}model.layers={stages} or more",
        )
    given = parallel.stages
    if isinstance(given, list) and all(isinstance(count, int) for count in given) and sum(given) != layers:
        yield UserError(
            f"its numbers add up to {sum(given)}, but model.layers={layers}",
            key="parallel.stages",
            value=f"[{','.join(map(str, given))}]",
            instead=f"numbers that add up to {layers}, or auto",
        )


def _size(model: Any, name: str) -> int | None:
    """A size of the model; None where it is not given, or is no size, which the model's own check tells."""
    value = model.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None
