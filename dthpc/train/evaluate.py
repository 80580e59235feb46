"""The loss on held-out data: every sample exactly once over the ranks, so that their number does not matter."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from dthpc.data.batches import micro_batches
from dthpc.data.loader import evaluation_batches
from dthpc.errors import UserError
from dthpc.train.callbacks import EvalRecord

if TYPE_CHECKING:
    from dthpc.train.loop import Training


def evaluate(t: Training, samples: int | None) -> EvalRecord | str:
    """Evaluate the model as it is; collective.

    Args:
        t: the training.
        samples: held-out samples, spread evenly over the data set; None for all.

    Returns:
        The result, the same on all ranks; or the name of the signal for which the ranks agreed to stop before it was
        complete.

    Raises:
        UserError: there is no held-out data.
    """
    started = time.perf_counter()
    valid = t.data.valid
    if not len(valid):
        raise UserError("the held-out data set has no samples", key="data", instead="more text, or train.eval_every=-1")
    for chunk in t.model.chunks:
        chunk.eval()
    try:
        sums = _sum_up(t, valid, samples)
    finally:
        for chunk in t.model.chunks:
            chunk.train()
    if isinstance(sums, str):
        return sums
    total, targets = sums
    loss = total / max(1, targets)
    return EvalRecord(
        step=t.state.step,
        loss=loss,
        bits_per_byte=bits_per_byte(loss, t.data, "valid"),
        targets=targets,
        seconds=time.perf_counter() - started,
        whole=samples is None or samples >= len(valid),
    )


def bits_per_byte(loss: float, data: Any, split: str) -> float | None:
    """A mean loss in nats a target as bits for each byte of text; None where the data does not know its bytes."""
    tell = getattr(data, "bytes_per_target", None)
    ratio = tell(split) if tell is not None else None
    return None if not ratio else loss / math.log(2) / ratio


@torch.no_grad()
def _sum_up(t: Training, valid: Any, samples: int | None) -> tuple[float, int] | str:
    """Sum of losses and number of targets over all ranks, or the signal of an agreed stop.

    Each round's sums travel while the next round is computed, and with them the wish to stop: a long evaluation must
    not use up the time that is left for saving.
    """
    rank, size = t.model.layout.dp_rank(t.context.identity.rank), t.model.layout.dp
    batch = t.model.micro_batch
    total, targets, sent = 0.0, 0, False
    for inputs, labels in evaluation_batches(valid, batch, rank, size, samples, same_count=True):
        loss_sum, count = _evaluate_batch(t, inputs, labels)
        if sent:
            agreed = t.header.receive()
            total, targets = total + agreed.loss, targets + agreed.targets
            if agreed.stop is not None:
                return agreed.stop
        t.header.send(targets=count, loss=loss_sum, stop=t.context.stop.requested)
        sent = True
    agreed = t.header.receive()
    return total + agreed.loss, targets + agreed.targets


def _evaluate_batch(t: Training, inputs: Any, labels: Any) -> tuple[float, int]:
    [(inputs, labels)] = micro_batches(inputs, labels, None, 1, t.context.device)
    return t.model.evaluate(inputs, labels)
