"""Building blocks of the decoder: norms, rotary positions, grouped-query attention and the two feed-forward forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.dropout = dropout
        self.q = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over `x` `[B, T, dim]`; `rope` holds the first T rows of `rope_table`, or None for none."""
        # Head counts come from the projections' widths, so that a rank that holds a part of the heads runs this too.
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


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
