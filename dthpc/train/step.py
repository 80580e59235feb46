"""The arithmetic of one step: forward and backward over the micro-batches, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    model: ParallelModel, loss: Loss, batch: StepBatch, micro_batch: int | None, header: Header, device: torch.device
) -> tuple[Agreed, float]:
    """Accumulate the gradient of the global batch's mean loss.

    The number of targets of the global batch is on its way in `header`; it is waited for only when the first backward
    pass needs it.

    Returns:
        What the ranks agreed on, and this rank's sum of losses. Where they agreed to stop, nothing has changed.
    """
    copies = model.begin_step()
    agreed: Agreed | None = None
    total, counted = 0.0, 0
    parts = list(micro_batches(batch.inputs, batch.targets, micro_batch, device))
    for number, (inputs, targets) in enumerate(parts, start=1):
        with model.precision.autocast():
            loss_sum, count = loss(model.module(inputs), targets)
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


def _check_count(loss: Loss, targets: Any, counted: int) -> None:
    expected = expected_count(loss, targets)
    if counted != expected:
        raise UserError(
            f"it counted {counted} targets where {expected} were expected, so its mean would depend on the layout",
            key="loss._target_",
            value=getattr(loss, "__name__", type(loss).__name__),
            instead="return the number of targets that are not -100, or give the loss an attribute "
            "`count_targets(targets) -> int` that tells how it counts",
        )
