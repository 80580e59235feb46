"""Linear layers whose weight gradients can wait: the backward pass gives the input's gradient at once, and leaves what
the weights' needs in a store, for a later action of a zero-bubble schedule (Qi et al. 2024, "Zero bubble pipeline
parallelism", section 2).

The operations are those of the plain backward pass, so the gradients are the same bit for bit. Only where autocast is
on and a weight is used twice in a pass do they differ: autocast adds both shares in 16 bits, here they are added in the
weight's own format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightStore:
    """Weight gradients that wait, under the key of the pass that left them."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._kept: dict[Hashable, list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]]] = {}

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Around a backward pass: its weight gradients are left under `key`, which is not None."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @property
    def deferring(self) -> bool:
        """Whether a backward pass that runs now leaves its weight gradients."""
        return self._key is not None

    def keep(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
        """Leave one layer's: `x` `[..., in]` and the gradient of its output `[..., out]`."""
        self._kept.setdefault(self._key, []).append((weight, bias, x, gradient))

    def compute(self, key: Hashable) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters whose gradients were left under a key, each once, with its gradient."""
        gradients: dict[nn.Parameter, Tensor] = {}
        kept = self._kept.pop(key, [])
        while kept:
            weight, bias, x, gradient = kept.pop(0)
            for parameter, part in zip((weight, bias), weight_gradients(weight, bias, x, gradient), strict=True):
                if parameter is not None and part is not None:
                    before = gradients.get(parameter)
                    gradients[parameter] = part if before is None else before + part
        return list(gradients.items())

    def clear(self) -> None:
        """Drop what is left of a step that was abandoned."""
        self._kept.clear()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, store: WeightStore | None = None) -> Tensor:
    """`torch.nn.functional.linear` with weight gradients that can wait.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        store: decides at the time of the backward pass whether they do; None: never.

    Returns:
        `[..., out]`, in the format of autocast where that is on.
    """
    if store is None or not torch.is_grad_enabled() or x.dim() < 2 or not isinstance(weight, nn.Parameter):
        return F.linear(x, weight, bias)
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _apply(x, weight, bias, None, store)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return _apply(x.to(dtype), weight, bias, dtype, store)


def defer_weights(chunks: Sequence[nn.Module], store: WeightStore) -> None:
    """Let the weight gradients of all linear layers in `chunks` wait on `store`'s word.

    Layers of other classes that have an attribute `weight_store` get it set, and call `linear` with it. A weight that
    something else uses too, such as a tied embedding, is left as it is: its gradient must be complete when it is told.
    """
    users: Counter[nn.Parameter] = Counter()
    layers: list[nn.Module] = []
    for chunk in chunks:
        for module in chunk.modules():
            users.update(p for p in module.parameters(recurse=False))
            if type(module) is nn.Linear or hasattr(module, "weight_store"):
                layers.append(module)
    for layer in layers:
        users.subtract(layer.parameters(recurse=False))
    for layer in layers:
        if any(users[parameter] for parameter in layer.parameters(recurse=False)):
            continue
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, store)  # type: ignore[method-assign]
        else:
            layer.weight_store = store  # type: ignore[assignment]


def weight_gradients(
    weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a linear layer's weight and bias, in their formats.

    Args:
        weight: `[out, in]`.
        bias: `[out]`, or None.
        x: its input `[..., in]`.
        gradient: of its output, `[..., out]`, in the format of `x`.
    """
    flat = gradient.flatten(0, -2)
    of_weight = flat.t().mm(x.flatten(0, -2)).to(weight.dtype) if weight.requires_grad else None
    of_bias = flat.sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None
    return of_weight, of_bias


def _forward(layer: nn.Linear, store: WeightStore, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, store)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, store: WeightStore
    ) -> Tensor:
        cast, offset = weight, bias
        if dtype is not None:
            cast, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        return F.linear(x, cast, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, cast = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient.flatten(0, -2).mm(cast).view(x.shape)
        if ctx.store.deferring:
            ctx.store.keep(ctx.weight, ctx.bias, x, gradient)
            return of_x, None, None, None, None
        return of_x, *weight_gradients(ctx.weight, ctx.bias, x, gradient), None, None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, store: WeightStore) -> Tensor:
    result: Tensor = _Linear.apply(x, weight, bias, dtype, store)  # type: ignore[no-untyped-call]
    return result
