"""The two layers that are split by the vocabulary: the embedding of tokens, and the output that scores each."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.parallel.tensor.axis import TensorAxis
from dthpc.parallel.tensor.functions import reduce, reduce_scatter
from dthpc.parallel.tensor.linear import ColumnLinear


class VocabEmbedding(nn.Module):
    """An embedding of which this rank holds some rows; the ranks' finds are summed, all but one being zero.

    Maps int64 `[B, T]` to `[B, T, dim]`, or with sequence parallelism to this rank's part of the sequence,
    `[B, T / tp, dim]`, in the dtype of the weight.
    """

    def __init__(self, axis: TensorAxis, weight: nn.Parameter, total: int, padding: int | None) -> None:
        """Take the rank's rows.

        Args:
            axis: the ranks.
            weight: `[rows, dim]`.
            total: rows of all ranks.
            padding: number of the token whose vector is never trained; None for none.
        """
        super().__init__()
        self.axis = axis
        self.weight = weight
        self.total = total
        self.start, self.rows = axis.share(total)
        here = padding is not None and self.start <= padding < self.start + self.rows
        self.padding = padding - self.start if padding is not None and here else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Look tokens up.

        Raises:
            IndexError: a token lies outside the vocabulary (found where tokens are on the CPU).
        """
        if tokens.device.type == "cpu" and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.total:
            raise IndexError(f"tokens from {tokens.min()} to {tokens.max()} in a vocabulary of {self.total}")
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_scatter(found, self.axis) if self.axis.sequence_parallel else reduce(found, self.axis)

    def extra_repr(self) -> str:
        """Sizes of the part."""
        return f"rows {self.start} to {self.start + self.rows - 1} of {self.total}, dim={self.weight.shape[1]}"


class VocabHead(ColumnLinear):
    """A linear layer that gives this rank's share of the logits, of the whole sequence; see `ColumnLinear`."""

    def __init__(self, axis: TensorAxis, weight: nn.Parameter, bias: nn.Parameter | None, total: int) -> None:
        """Take the rank's part of the parameters, and the number of logits on all ranks."""
        super().__init__(axis, weight, bias)
        self.total = total
