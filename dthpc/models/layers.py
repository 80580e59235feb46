"""Building blocks of the decoder: norms, rotary positions, grouped-query attention and the two feed-forward forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.models.dropout import Streamed


def make_norm(kind: str, dim: int) -> nn.Module:
    """RMSNorm (`"rms"`, Zhang and Sennrich 2019) or LayerNorm (`"layer"`) over the last dimension."""
    return nn.RMSNorm(dim, eps=1e-6) if kind == "rms" else nn.LayerNorm(dim)


def rope_table(head_dim: int, length: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embeddings (Su et al. 2021, "RoFormer").

    Args:
        head_dim: size of one head; even.
        length: number of positions.
        base: wavelengths run from 2π to 2π·base.

    Returns:
        Two fp32 tensors `[length, head_dim / 2]`.
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of `x` by its position's angle, so that q·k depends only on the distance.

    Args:
        x: `[B, heads, T, head_dim]`.
        cos: `[T, head_dim / 2]`.
        sin: `[T, head_dim / 2]`.

    Returns:
        As `x`, in the dtype of `x`; the arithmetic is done in the wider of the two dtypes.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each position, added to what stands there."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, dim))
        self.shard: tuple[int, int, int] | None = None
        """(dimension, index, count): the input is the index-th of `count` equal slices of the sequence; None: it is
        whole. Set by sequence parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, dim]` to itself."""
        start = 0 if self.shard is None else self.shard[1] * x.shape[1]
        return x + self.weight[start : start + x.shape[1]]


class AttentionCore(Streamed):
    """softmax(Q Kᵀ / √d) V, the part of attention that has no weights (Vaswani et al. 2017, eq. 1).

    Dropout of the attention weights follows the samples and global heads on the CPU, so it agrees in all layouts. On a
    GPU it is that of the fused kernel, which draws from the rank's generator: repeatable, but another one in each
    layout. Storing the weights only to drop some of them would cost memory that grows with the square of the sequence.
    """

    def __init__(self, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.first_head = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            q: `[B, heads, T, head_dim]`.
            k: `[B, kv_heads, T, head_dim]`, kv_heads a divisor of heads.
            v: as `k`.

        Returns:
            As `q`.
        """
        p = self.dropout if self.training else 0.0
        if p and self.stream is not None and q.device.type != "cuda":
            return self._attend_by_samples(q, k, v, p)
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=p, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _attend_by_samples(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (heads.repeat_interleave(group, dim=1) for heads in (k, v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32)
        weights = self.drop(weights, p, (1, self.first_head, self.first_head + q.shape[1]))
        return weights.to(v.dtype) @ v


class Attention(nn.Module):
    """Self-attention with grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, *, bias: bool, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.core = AttentionCore(causal=causal, dropout=dropout)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    @property
    def first_head(self) -> int:
        """Global number of the first query head here; above 0 where a rank holds a part of the heads."""
        return self.core.first_head

    @first_head.setter
    def first_head(self, number: int) -> None:
        self.core.first_head = number

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over `x` `[B, T, dim]`; `rope` holds at least the first T rows of `rope_table`, or None for none."""
        # Head counts come from the projections' widths, so that a rank that holds a part of the heads runs this too;
        # the length comes from them as well, since sequence parallelism brings the sequence together only there.
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        if rope is not None:
            cos, sin = (table[: q.shape[2]] for table in rope)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        result: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward `down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., dim]` to `[..., dim]`."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class GELU(nn.Module):
    """Feed-forward `down(gelu(up(x)))`, with the tanh form of GELU that GPT-2 uses."""

    def __init__(self, dim: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., dim]` to `[..., dim]`."""
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result
