"""A decoder-only transformer language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dthpc.errors import raise_together
from dthpc.models.check import default_hidden, find_mistakes
from dthpc.models.dropout import Dropout
from dthpc.models.layers import GELU, Attention, LearnedPositions, SwiGLU, make_norm, rope_table
from dthpc.models.pipeline import PipelineLayer, block_layers

INIT_STD = 0.02

BLOCK_PLAN = {
    "blocks.*_norm": "sequence",
    "blocks.*_dropout": "sequence",
    "blocks.*.attention": "attention",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp": "shared_input",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
"""How the blocks are split over tensor-parallel ranks; the words are those of `dthpc/parallel/tensor/plan.py`."""


class Block(nn.Module):
    """One pre-norm layer: attention and feed-forward, each on the residual stream."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        *,
        norm: str,
        mlp: str,
        bias: bool,
        dropout: float,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, dim)
        self.attention = Attention(dim, heads, kv_heads, bias=bias, dropout=dropout, causal=causal)
        self.attention_dropout = Dropout(dropout)
        self.mlp_norm = make_norm(norm, dim)
        self.mlp = SwiGLU(dim, hidden, bias=bias) if mlp == "swiglu" else GELU(dim, hidden, bias=bias)
        self.mlp_dropout = Dropout(dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Map the residual stream `[B, T, dim]` to itself."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rope))
        after: Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return after


class GPT(nn.Module):
    """Decoder-only transformer: tokens `[B, T]` to logits `[B, T, vocab_size]`.

    Layers are held by number in a `ModuleDict`, so that a pipeline stage that keeps only some of them keeps their
    global names; a child that another stage holds is None. Initial values are set by name, by
    `dthpc.models.init.init_parameters`.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 256,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        max_seq_len: int = 256,
        norm: str = "rms",
        position: str = "rope",
        mlp: str = "swiglu",
        tie_embeddings: bool = True,
        dropout: float = 0.0,
    ) -> None:
        """Build the model; its parameters hold no values worth using before `init_parameters`.

        Args:
            vocab_size: number of tokens.
            dim: width of the residual stream.
            layers: number of blocks.
            heads: number of query heads; divides `dim`.
            kv_heads: number of key/value heads; divides `heads`; None means as many as `heads`.
            hidden: width of the feed-forward; None means 4·dim for GELU, and for SwiGLU about 8/3·dim, the same
                number of parameters.
            max_seq_len: longest sequence.
            norm: "rms" or "layer".
            position: "rope" or "learned".
            mlp: "swiglu" or "gelu".
            tie_embeddings: whether the output layer uses the token embedding's weights.
            dropout: probability, in the attention weights, after each sub-layer and after the embedding.

        Raises:
            UserError: sizes that do not fit each other, or an unknown word.
        """
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        hidden = default_hidden(dim, mlp) if hidden is None else hidden
        raise_together(find_mistakes(locals()))
        self.layers_total = layers
        self.max_seq_len = max_seq_len
        self.tie_embeddings = tie_embeddings
        # LayerNorm models carry biases as GPT-2 does; RMSNorm models have none, as LLaMA.
        bias = norm == "layer"
        self.embed = nn.Embedding(vocab_size, dim)
        self.position = LearnedPositions(max_seq_len, dim) if position == "learned" else None
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleDict(
            {
                str(number): Block(dim, heads, kv_heads, hidden, norm=norm, mlp=mlp, bias=bias, dropout=dropout)
                for number in range(layers)
            }
        )
        self.norm = make_norm(norm, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embed.weight
        self.head_dim = dim // heads if position == "rope" else None
        self.register_buffer("rope_cos", None, persistent=False)
        self.register_buffer("rope_sin", None, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the tables of rotary positions anew, where the parameters are.

        A checkpoint does not hold them, and memory given to a model that was built on the meta device has no values.
        """
        if self.head_dim is None:
            return
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        self.rope_cos, self.rope_sin = (table.to(device) for table in rope_table(self.head_dim, self.max_seq_len))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token; a pipeline stage maps what its neighbours exchange.

        Args:
            x: tokens, int64 `[B, T]`, T at most `max_seq_len`; for all stages but the first, the residual stream
                `[B, T, dim]`.

        Returns:
            `[B, T, vocab_size]`, fp32, or the autocast dtype; of all stages but the last, the residual stream, fp32.
        """
        if self.embed is not None:
            # The residual stream is a long sum: fp32, also where the table is stored in 16 bits.
            x = self.embed(x).float()
        if self.position is not None:
            x = self.position(x)
        if self.dropout is not None:
            x = self.dropout(x)
        rope = None if self.head_dim is None else (self.rope_cos, self.rope_sin)
        for block in self.blocks.values():
            x = block(x, rope)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        return x

    def pipeline_layers(self) -> list[PipelineLayer]:
        """One layer for each block, with the embedding at the first and the output at the last."""
        return block_layers(self, ("embed", "position", "dropout"), ("norm", "head"), self.max_seq_len)

    def tensor_plan(self) -> dict[str, str]:
        """How the modules are split over tensor-parallel ranks; see `dthpc/parallel/tensor/plan.py`."""
        return {
            "embed": "vocab_embedding",
            "position": "sequence",
            "dropout": "sequence",
            **BLOCK_PLAN,
            "norm": "sequence",
            "head": "vocab_head",
        }

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter with its initial values, drawn from `generator` alone; see `fill_block_parameter`."""
        fill_block_parameter(name, parameter, generator, self.layers_total)


@torch.no_grad()
def fill_block_parameter(name: str, parameter: Tensor, generator: torch.Generator, layers: int) -> None:
    """Fill one parameter of a transformer with its initial values.

    Matrices are normal with deviation 0.02; those that write to the residual stream are scaled down by √(2·layers), so
    that its variance does not grow with depth (Radford et al. 2019). Norms start at one, biases at zero.

    Args:
        name: global name.
        parameter: the whole parameter.
        generator: draws the values.
        layers: number of blocks of the whole model.
    """
    if parameter.dim() < 2:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    parameter.normal_(0.0, INIT_STD / math.sqrt(2 * layers) if writes_residual else INIT_STD, generator=generator)
