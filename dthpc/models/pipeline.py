"""How a model says where it may be cut into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from dthpc.models.layers import Attention


@dataclass(frozen=True)
class PipelineLayer:
    """What always stays on one stage."""

    names: tuple[str, ...]
    """Global names of its modules, such as `("embed", "blocks.0")`."""

    cost: float
    """Work of its forward pass in any unit, such as FLOPs for one token; stages are balanced by it."""


@runtime_checkable
class PipelineModel(Protocol):
    """A model that can be cut.

    Its `forward` must run what is left of it: a child that another stage holds is None, or absent from its
    `ModuleDict`. What one stage's forward returns, a single tensor with the batch in its first dimension, is the next
    one's input.
    """

    def pipeline_layers(self) -> list[PipelineLayer]:
        """The layers, in the order in which they run; every parameter belongs to exactly one, or is tied."""


def block_layers(model: nn.Module, before: tuple[str, ...], after: tuple[str, ...], length: int) -> list[PipelineLayer]:
    """One layer for each child of `model.blocks`; what runs before and after them goes with the first and the last.

    Costs are FLOPs of the forward pass for one position: two for each weight of a linear layer, and 4·length·width for
    the products of attention (a third of what Chowdhery et al. 2022, "PaLM", App. B, count for forward and backward).

    Args:
        model: the whole model; it may be on the meta device.
        before: its children that run before the blocks; those that are None are left out.
        after: its children that run after them.
        length: positions of a sequence.
    """
    blocks = [f"blocks.{number}" for number, _ in model.get_submodule("blocks").named_children()]
    names: list[tuple[str, ...]] = [(name,) for name in blocks]
    names[0] = (*(name for name in before if getattr(model, name) is not None), *names[0])
    names[-1] = (*names[-1], *(name for name in after if getattr(model, name) is not None))
    return [PipelineLayer(each, sum(_flops(model.get_submodule(name), length) for name in each)) for each in names]


def _flops(module: nn.Module, length: int) -> float:
    linear = sum(2 * part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
    attention = sum(4 * length * part.q.out_features for part in module.modules() if isinstance(part, Attention))
    return float(linear + attention)
