"""The arithmetic of one step: forward and backward over the micro-batches, and the update."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dthpc.data.loader import StepBatch
from dthpc.errors import UserError
from dthpc.models.losses import count_targets
from dthpc.parallel.apply import ParallelModel
from dthpc.train.batches import micro_batches
from dthpc.train.header import Agreed, Header

Loss = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""Outputs and targets to the sum of losses (fp32 scalar) and the number of targets that count (int64 scalar)."""


def forward_backward(
    model: ParallelModel,
    loss: Loss,
    batch: StepBatch,
    micro_batch: int | None,
    header: Header,
    device: torch.device,
    first: bool = False,
) -> tuple[Agreed, float]:
    """Accumulate the gradient of the global batch's mean loss.

    The number of targets of the global batch is on its way in `header`; it is waited for only when the first backward
    pass needs it.

    Args:
        model: on its mesh.
        loss: sum of losses and number of targets.
        batch: this rank's share of the step.
        micro_batch: samples of one pass; None for the whole share.
        header: has been sent.
        device: where the model is.
        first: whether this is the attempt's first step, in which the loss is held to its contract.

    Returns:
        What the ranks agreed on, and this rank's sum of losses. Where they agreed to stop, nothing has changed.

    Raises:
        UserError: the loss returns something else than it should, or counts otherwise than it says.
    """
    copies = model.begin_step()
    agreed: Agreed | None = None
    total, counted = 0.0, 0
    parts = list(micro_batches(batch.inputs, batch.targets, micro_batch, device))
    for number, (inputs, targets) in enumerate(parts, start=1):
        with model.precision.autocast():
            result = loss(model.module(inputs), targets)
        if first and number == 1:
            check_result(loss, result)
        loss_sum, count = result
        agreed = agreed or header.receive()
        if agreed.stop is not None:
            break
        with model.gradients.last_backward(number == len(parts)):
            (loss_sum / max(1, agreed.targets)).backward()  # type: ignore[no-untyped-call]
        total += loss_sum.item()
        counted += int(count)
    agreed = agreed or header.receive()
    if agreed.stop is not None:
        model.abandon_step(copies)
        return agreed, 0.0
    _check_count(loss, batch.targets, counted)
    model.finish_step()
    return agreed, total


def clip(model: ParallelModel, largest: float | None) -> float:
    """Scale the gradients down to a global norm of at most `largest`; returns the norm before."""
    norm = model.gradients.norm().item()
    if largest is not None and math.isfinite(norm) and norm > largest:
        model.gradients.scale(largest / norm)
    return norm


def expected_count(loss: Loss, targets: Any) -> int:
    """Targets that a loss will count, known before the forward pass: what its `count_targets` says, if it has one."""
    return int(getattr(loss, "count_targets", count_targets)(targets))


def check_result(loss: Loss, result: Any) -> None:
    """Raise `UserError` if what a loss returned in a training step is not a sum to differentiate and a count."""
    why = _find_mistake(result)
    if why is not None:
        raise UserError(
            why,
            key="loss._target_",
            value=_name(loss),
            instead="return (sum, count): the sum of the losses over the targets, as a scalar tensor that depends on "
            "the outputs, and the number of targets that count, as an integer",
        )


def _find_mistake(result: Any) -> str | None:
    if not isinstance(result, tuple | list):
        return f"it returned only one value ({_describe(result)})"
    if len(result) != 2:
        return f"it returned {len(result)} values"
    total, count = result
    if not isinstance(total, Tensor):
        return f"its sum of losses is no tensor, but {_describe(total)}"
    if total.numel() != 1:
        return f"its sum of losses is no scalar, but {_describe(total)}"
    if not total.requires_grad:
        return "its sum of losses has no gradient: it is detached from the model's outputs"
    try:
        operator.index(count)
    except (TypeError, ValueError):
        return f"its number of targets is no integer, but {_describe(count)}"
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def _name(loss: Loss) -> str:
    """What the configuration calls a loss."""
    function = loss.func if isinstance(loss, partial) else loss
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _check_count(loss: Loss, targets: Any, counted: int) -> None:
    expected = expected_count(loss, targets)
    if counted != expected:
        raise UserError(
            f"it counted {counted} targets where {expected} were expected, so its mean would depend on the layout",
            key="loss._target_",
            value=_name(loss),
            instead="return the number of targets that are not -100, or give the loss an attribute "
            "`count_targets(targets) -> int` that tells how it counts",
        )
