"""Losses of logits that are split by the vocabulary over tensor-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dthpc.models.losses import IGNORE, count_targets, next_token
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.tensor.axis import TensorAxis
from dthpc.parallel.tensor.functions import gather_shares
from dthpc.parallel.tensor.vocab import VocabHead

Loss = Callable[[Tensor, Tensor], Any]
"""Outputs and targets to the sum over targets and their number."""


def split_loss(loss: Loss, chunks: Sequence[nn.Module], mesh: Mesh) -> Loss:
    """The form of a loss that takes what this rank's chunks put out.

    Args:
        loss: for whole outputs.
        chunks: after `split_tensors`.
        mesh: the axes.

    Returns:
        `loss` itself where outputs are whole. For a share of the logits, `vocab_parallel_loss`.
    """
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, VocabHead)]
    if mesh.size("tp") == 1 or not heads:
        return loss
    return functools.partial(vocab_parallel_loss, loss, axis=heads[0].axis, vocabulary=heads[0].total)


def vocab_parallel_loss(
    loss: Loss, outputs: Tensor, targets: Tensor, *, axis: TensorAxis, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """A loss of logits of which each rank holds a share; all ranks get the same.

    `next_token` is computed without ever putting the logits together; for any other loss they are gathered.

    Args:
        loss: for whole logits.
        outputs: `[..., n]`, n being this rank's share of the vocabulary.
        targets: int64 `[...]`; -100 marks a position that does not count.
        axis: the ranks.
        vocabulary: logits on all ranks.
    """
    if not _is_next_token(loss):
        return cast(tuple[Tensor, Tensor], loss(gather_shares(outputs, axis, vocabulary), targets))
    total = vocab_parallel_cross_entropy(outputs.flatten(0, -2), targets.flatten(), axis, vocabulary)
    return total, count_targets(targets)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: TensorAxis, vocabulary: int) -> Tensor:
    """Cross-entropy, summed over targets, as `F.cross_entropy(..., ignore_index=-100, reduction="sum")` in fp32.

    The ranks exchange three numbers for each position: the largest logit, the sum of exponentials and the target's
    logit (Shoeybi et al. 2019, "Megatron-LM", section 3, "parallel cross-entropy").

    Args:
        logits: `[N, n]`, n being this rank's share of the vocabulary; any float dtype.
        targets: int64 `[N]`; -100 marks a position that does not count.
        axis: the ranks.
        vocabulary: logits on all ranks.

    Returns:
        fp32 scalar, in nats, the same bits on all ranks.

    Raises:
        IndexError: a target lies outside the vocabulary (found where targets are on the CPU).
    """
    if targets.device.type == "cpu" and targets.numel():
        bad = targets[(targets != IGNORE) & ((targets < 0) | (targets >= vocabulary))]
        if bad.numel():
            raise IndexError(f"target {bad[0]} is out of bounds: the vocabulary has {vocabulary} tokens")
    return cast(Tensor, _CrossEntropy.apply(logits, targets, axis, vocabulary))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis, vocabulary: int) -> Tensor:
        start, size = axis.share(vocabulary)
        local = targets - start
        here = (local >= 0) & (local < size)
        column = local.clamp(0, size - 1).unsqueeze(1)
        scores = logits.float()
        # A share that is all -inf must give zeros, not the NaN of -inf - -inf.
        peak = scores.amax(1).clamp_(min=torch.finfo(torch.float32).min)
        target = scores.gather(1, column).squeeze(1).masked_fill_(~here, 0.0)
        exponentials = torch.sub(scores, peak.unsqueeze(1)).exp_()
        peaks, sums, hits = _exchange(torch.stack((peak, exponentials.sum(1), target)), axis)
        top = peaks.amax(0)
        normaliser = (sums * (peaks - top).exp_()).sum(0)
        counts = targets != IGNORE
        ctx.save_for_backward(exponentials, (peak - top).exp_().div_(normaliser).mul_(counts), column, here)
        ctx.dtype = logits.dtype
        # The differences are taken before the logarithm is added: that keeps the digits where logits are large.
        return ((top - hits.sum(0)) + normaliser.log()).masked_fill_(~counts, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, scale, column, here = ctx.saved_tensors
        result = exponentials * (scale * grad).unsqueeze(1)
        result.scatter_(1, column, result.gather(1, column) - (here * grad).unsqueeze(1))
        return result.to(ctx.dtype), None, None, None


def _exchange(mine: Tensor, axis: TensorAxis) -> tuple[Tensor, Tensor, Tensor]:
    """The ranks' three rows `[3, N]`, each as `[tp, N]`."""
    everyone = mine.new_empty(axis.size, *mine.shape)
    if mine.numel():
        axis.channel.all_gather(everyone.view(-1), mine.view(-1)).wait()
    peaks, sums, hits = everyone.unbind(1)
    return peaks, sums, hits


def _is_next_token(loss: Any) -> bool:
    while isinstance(loss, functools.partial) and not loss.args and not loss.keywords:
        loss = loss.func
    return loss is next_token
