"""Losses: each gives the sum over targets and their number, so that any split of the batch adds up to the same mean."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def next_token(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of class scores.

    Args:
        outputs: logits `[..., V]`, any float dtype.
        targets: int64 `[...]`; -100 marks a position that does not count.

    Returns:
        The sum over counted targets in nats (fp32 scalar) and their number (int64 scalar).
    """
    scores = outputs.float().flatten(0, -2)
    total = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, count_targets(targets)


def count_targets(targets: Tensor) -> Tensor:
    """Number of targets that count (int64 scalar): those that are not -100."""
    return (targets != IGNORE).sum()
