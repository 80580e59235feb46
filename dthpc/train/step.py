"""The arithmetic of one step: forward and backward over the micro-batches, whatever the layout."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dthpc.data.batches import micro_batches, rows
from dthpc.data.loader import StepBatch
from dthpc.errors import UserError
from dthpc.models.losses import count_targets
from dthpc.parallel.model import Loss, ParallelModel
from dthpc.train.header import Agreed, Header


class _StopAgreed(Exception):
    """The ranks agreed to stop, so this step is given up."""


class _Gate:
    """Waits for the step's header when the first backward pass needs the number of targets."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.agreed: Agreed | None = None

    def open(self) -> int:
        """Targets of the global batch; raises `_StopAgreed` where the ranks stop instead."""
        if self.agreed is None:
            self.agreed = self._header.receive()
            if self.agreed.stop is not None:
                raise _StopAgreed
        return max(1, self.agreed.targets)


def forward_backward(
    model: ParallelModel,
    batch: StepBatch,
    header: Header,
    device: torch.device,
    step: int,
    first: bool = False,
) -> tuple[Agreed, float]:
    """Accumulate the gradient of the global batch's mean loss.

    The number of targets of the global batch is on its way in `header`. It is waited for only when the first backward
    pass needs it; in a pipeline before anything is sent, since a step that is given up there would leave messages
    under way, and on a rank without samples before it reduces gradients that no backward pass makes.

    Args:
        model: on its mesh.
        batch: this rank's share of the step.
        header: has been sent.
        device: where the model is.
        step: updates made before; dropout masks depend on it.
        first: whether this is the attempt's first step, in which loss and model are held to their contracts.

    Returns:
        What the ranks agreed on, and the sum of losses where this rank computed losses that count, else 0. Where they
        agreed to stop, nothing has changed.

    Raises:
        UserError: the loss returns something else than it should, or counts otherwise than it says; parameters take no
            part in the step.
    """
    gate = _Gate(header)
    copies = model.begin_step(step, batch.first)
    parts = list(micro_batches(batch.inputs, batch.targets, model.micro_batch, model.passes, device))
    try:
        if model.layout.pp > 1 or (model.layout.zero < 3 and not rows(batch.inputs)):
            gate.open()
        model.forward_backward(parts, gate.open, check_result if first else None)
        gate.open()
    except _StopAgreed:
        assert gate.agreed is not None
        model.abandon_step(copies)
        return gate.agreed, 0.0
    assert gate.agreed is not None
    model.finish_step()
    # Only now is the device waited for, when all of the step's work has been handed to it.
    total, counted = model.result()
    if counted is not None:
        _check_count(model.loss, batch.targets, counted)
    return gate.agreed, total if model.counts_loss else 0.0


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
