"""Activation checkpointing: a layer keeps its inputs alone, and is computed again in the backward pass.

`full` (Chen et al. 2016, "Training deep nets with sublinear memory cost") recomputes whole layers; `selective`
(Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 5) only the products
of attention, whose activations grow with the square of the sequence and cost few FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dthpc.errors import UserError
from dthpc.models.layers import AttentionCore
from dthpc.models.pipeline import PipelineModel

NONE, FULL, SELECTIVE = "none", "full", "selective"


def checkpoint_activations(chunks: Sequence[nn.Module], config: Any) -> None:
    """Make layers keep less for the backward pass; values and gradients stay the same bit for bit.

    Only `forward` is replaced, which runs inside a module's hooks: what gathers parameters before a layer and frees
    them after it stays outside, and is not run again.

    Args:
        chunks: this rank's parts of the model, with their global names.
        config: the configuration `parallel.activations`.

    Raises:
        UserError: the model has no layers, or no attention, to choose.
    """
    if config.mode == NONE:
        return
    layers = [layer for chunk in chunks for layer in layers_of(chunk)]
    # A stage of a pipeline may hold an embedding alone.
    if not layers and not any(isinstance(chunk, PipelineModel) for chunk in chunks):
        raise UserError(
            f"{_names(chunks)} keeps no layers in an nn.ModuleList, nn.ModuleDict or nn.Sequential to choose from",
            key="parallel.activations.mode",
            value=config.mode,
            instead="parallel.activations.mode=none, or hold the model's layers in an nn.ModuleList",
        )
    chosen = [module for number, module in layers if number % config.every == 0]
    if config.mode == SELECTIVE:
        chosen = [part for module in chosen for part in attention_of(module)]
        if not chosen and layers:
            raise UserError(
                f"the layers of {_names(chunks)} hold no attention",
                key="parallel.activations.mode",
                value=config.mode,
                instead="parallel.activations.mode=full, or name the class of the attention `…Attention…`",
            )
    for module in chosen:
        _recompute(module)


def layers_of(chunk: nn.Module) -> list[tuple[int, nn.Module]]:
    """The layers of a model and their numbers: children of its outermost `ModuleList`s that hold parameters.

    Of a model without such, those of its `ModuleDict`s, and at last of its `Sequential`s. Children that are named by
    numbers have these, so that a pipeline stage chooses the same layers as the whole model.
    """
    kinds: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    for kind in kinds:
        containers = _outermost(chunk, partial(_is_a, kind))
        children = [child for container in containers for child in container.named_children()]
        held = [(name, child) for name, child in children if any(True for _ in child.parameters())]
        if held:
            return [(int(name) if name.isdecimal() else place, child) for place, (name, child) in enumerate(held)]
    return []


def attention_of(layer: nn.Module) -> list[nn.Module]:
    """The attention in a layer: its products where they are a module of their own, else each `…Attention…` whole."""
    cores = _outermost(layer, partial(_is_a, AttentionCore))
    return cores or _outermost(layer, lambda module: "attention" in type(module).__name__.lower())


def _is_a(kind: type[nn.Module], module: nn.Module) -> bool:
    return isinstance(module, kind)


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The module itself or its nearest descendants of some kind."""
    if wanted(module):
        return [module]
    return [found for child in module.children() for found in _outermost(child, wanted)]


def _recompute(module: nn.Module) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        function, tensors = _over_distinct_tensors(inner, args, kwargs)
        # The generator's state is kept for modules that draw from it; ours take their masks from the samples at hand.
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=True, determinism_check="none")

    module.forward = forward


def _over_distinct_tensors(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """A call as a function of its tensors, each once.

    `checkpoint` hands a tensor that is given twice back as two, and `nn.MultiheadAttention` does other arithmetic when
    its query is its key.
    """
    values = [*args, *kwargs.values()]
    tensors = list({id(value): value for value in values if isinstance(value, Tensor)}.values())
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    # What stays in the closure is no tensor: those are kept by `checkpoint` alone.
    sources = [places.get(id(value)) for value in values]
    rest = [None if place is not None else value for place, value in zip(sources, values, strict=True)]
    count, names = len(args), list(kwargs)

    def call(*given: Tensor) -> Any:
        filled = [value if place is None else given[place] for place, value in zip(sources, rest, strict=True)]
        return inner(*filled[:count], **dict(zip(names, filled[count:], strict=True)))

    return call, tensors


def _names(chunks: Sequence[nn.Module]) -> str:
    return ", ".join(sorted({type(chunk).__name__ for chunk in chunks}))
