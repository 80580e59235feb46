"""From a plain model to one that trains on a mesh: the order of operations, on one screen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from dthpc.errors import UserError
from dthpc.parallel.buckets import GradientBuckets
from dthpc.parallel.layout import Layout
from dthpc.parallel.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ParallelModel:
    """A model on its mesh: what the training step needs to know, whatever the layout."""

    module: nn.Module
    """The part of the model that this rank holds; its parameters keep their global names."""

    gradients: GradientBuckets
    """Its gradients."""

    precision: Precision
    """Number format of its arithmetic."""

    layout: Layout
    """The degrees."""

    group: dist.ProcessGroup | None
    """Ranks that share a global batch; None for a single process."""

    buffers: list[Tensor]
    """What the module keeps beside its parameters and saves with them, such as running statistics."""

    def begin_step(self) -> list[Tensor]:
        """Zero the gradients; returns copies of the buffers for `abandon_step`."""
        self.gradients.zero()
        return [buffer.clone() for buffer in self.buffers]

    def finish_step(self) -> None:
        """Wait for the gradients' sums, and give every replica the first one's buffers, which are saved."""
        self.gradients.finish()
        if self.group is not None:
            _broadcast(self.buffers, self.group)

    def abandon_step(self, copies: list[Tensor]) -> None:
        """Undo what forward passes since `begin_step` left behind."""
        for buffer, copy in zip(self.buffers, copies, strict=True):
            buffer.copy_(copy)


def parallelize(model: nn.Module, layout: Layout, mesh: DeviceMesh, config: Any) -> ParallelModel:
    """Apply a layout to a model.

    Args:
        model: the whole model, initialised, on this rank's device.
        layout: the degrees.
        mesh: made by `layout`.
        config: the whole configuration.

    Returns:
        The model with replicated weights (equal on all replicas from here on) and bucketed gradients.

    Raises:
        UserError: the model has nothing to train, weights that are not fp32, or differs between ranks.
    """
    _check_parameters(model)
    group = mesh.get_group("dp") if layout.dp > 1 else None
    if group is not None:
        _check_alike(model, group)
        # Equal by name and seed for our models; a user's model may draw its weights as it likes.
        _broadcast([*model.parameters(), *model.buffers()], group)
    gradients = GradientBuckets(model.parameters(), group, config.parallel.bucket_mb << 20)
    precision = Precision(config.precision.compute, mesh.device_type)
    return ParallelModel(model, gradients, precision, layout, group, persistent_buffers(model))


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that belong to the model's state."""
    saved = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def _broadcast(tensors: list[Any], group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    works = [dist.broadcast(tensor.detach(), source, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def _check_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise the same `UserError` on all ranks if their models differ in more than values; collective."""
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


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _check_parameters(model: nn.Module) -> None:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise UserError("the model has no parameter to train", key="model._target_", value=type(model).__name__)
    for name, parameter in trained:
        if str(parameter.dtype) != "torch.float32":
            raise UserError(
                f"parameter {name} is {parameter.dtype}; master weights are fp32",
                key="model._target_",
                value=type(model).__name__,
                instead="build the model in fp32 and choose the arithmetic with precision.compute",
            )
