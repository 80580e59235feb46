"""What a model must be before it is spread over ranks: trainable, and the same on all of them."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from dthpc.errors import UserError


def check_alike(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise the same `UserError` on all ranks if their models differ in more than values; collective."""
    if group is None:
        return
    mine = [
        f"{name} {list(tensor.shape)} {tensor.dtype}"
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    digests = _gather(hashlib.blake2b("\n".join(mine).encode(), digest_size=16).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    models = _gather(mine, group)
    for rank, other in enumerate(models):
        for first, here in zip_longest(models[0], other, fillvalue="nothing"):
            if first != here:
                raise UserError(
                    f"the ranks build different models: where rank {dist.get_global_rank(group, 0)} has {first}, "
                    f"rank {dist.get_global_rank(group, rank)} has {here}",
                    key="model._target_",
                    value=type(model).__name__,
                    instead="build the same parameters, with the same names and in the same order, on every rank",
                )


def check_trainable(model: nn.Module) -> None:
    """Raise `UserError` for a model without trainable parameters, or with some that are not fp32."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise UserError("the model has no parameter to train", key="model._target_", value=type(model).__name__)
    for name, parameter in trained:
        if str(parameter.dtype) != "torch.float32":
            raise UserError(
                f"parameter {name} is {parameter.dtype}; master weights are fp32",
                key="model._target_",
                value=type(model).__name__,
                instead="build the model in fp32 and choose the formats with precision.compute and "
                "precision.parameters",
            )


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
