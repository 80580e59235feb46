"""A vision transformer for small images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.errors import raise_together
from dthpc.models.check import default_hidden, find_mistakes
from dthpc.models.dropout import Dropout
from dthpc.models.gpt import BLOCK_PLAN, Block, fill_block_parameter
from dthpc.models.layers import LearnedPositions
from dthpc.models.pipeline import PipelineLayer, block_layers

POSITION_STD = 0.5


class Patches(nn.Module):
    """Cuts an image into square patches and maps each to a vector."""

    def __init__(self, channels: int, size: int, dim: int) -> None:
        super().__init__()
        self.size = size
        self.linear = nn.Linear(channels * size * size, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Map `[B, C, H, W]` to `[B, H·W / size², dim]`, row by row of patches."""
        patches = F.unfold(images, self.size, stride=self.size).transpose(1, 2)
        vectors: Tensor = self.linear(patches)
        return vectors


class MeanPool(nn.Module):
    """The mean over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, dim]` to `[B, dim]`."""
        return x.mean(dim=1)


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2020): images `[B, C, H, W]` to class scores `[B, classes]`.

    The decoder's blocks, with attention in both directions, LayerNorm and GELU; learned positions; and the mean of all
    positions in place of a class token, so that the sequence's length is the number of patches.
    """

    def __init__(
        self,
        *,
        image_size: int = 8,
        patch_size: int = 2,
        channels: int = 1,
        classes: int = 10,
        dim: int = 64,
        layers: int = 4,
        heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Build the model; its parameters hold no values worth using before `init_parameters`.

        Args:
            image_size: height and width of an image, in pixels.
            patch_size: height and width of a patch; divides `image_size`.
            channels: of an image.
            classes: number of classes.
            dim: width of the residual stream.
            layers: number of blocks.
            heads: number of heads; divides `dim`.
            hidden: width of the feed-forward; None means 4·dim.
            dropout: probability, in the attention weights, after each sub-layer and after the embedding.

        Raises:
            UserError: sizes that do not fit each other.
        """
        super().__init__()
        raise_together(find_mistakes(locals()))
        hidden = default_hidden(dim, "gelu") if hidden is None else hidden
        self.layers_total = layers
        self.patches = (image_size // patch_size) ** 2
        self.embed = Patches(channels, patch_size, dim)
        self.position = LearnedPositions(self.patches, dim)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleDict(
            {
                str(number): Block(
                    dim, heads, heads, hidden, norm="layer", mlp="gelu", bias=True, dropout=dropout, causal=False
                )
                for number in range(layers)
            }
        )
        self.norm = nn.LayerNorm(dim)
        self.pool = MeanPool()
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes; a pipeline stage maps what its neighbours exchange.

        Args:
            x: images, float `[B, C, H, W]`; for all stages but the first, the residual stream `[B, T, dim]`.

        Returns:
            `[B, classes]`, fp32, or the autocast dtype; of all stages but the last, the residual stream, fp32.
        """
        if self.embed is not None:
            x = self.embed(x).float()
        for module in (self.position, self.dropout, *self.blocks.values(), self.norm, self.pool, self.head):
            if module is not None:
                x = module(x)
        return x

    def pipeline_layers(self) -> list[PipelineLayer]:
        """One layer for each block, with the patches at the first and the classifier at the last."""
        return block_layers(self, ("embed", "position", "dropout"), ("norm", "pool", "head"), self.patches)

    def tensor_plan(self) -> dict[str, str]:
        """How the modules are split over tensor-parallel ranks; see `dthpc/parallel/tensor/plan.py`."""
        return {
            "embed": "scatter",
            "position": "sequence",
            "dropout": "sequence",
            **BLOCK_PLAN,
            "norm": "sequence",
            "pool": "gather",
            "head": "whole",
        }

    @torch.no_grad()
    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter with its initial values, drawn from `generator` alone.

        As the decoder's, but for what enters the first block: patches are mapped with a deviation of 1/√(values in a
        patch), and positions have about the size that this gives to patches, so that neither drowns the other.
        """
        if name == "embed.linear.weight":
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        elif name == "position.weight":
            parameter.normal_(0.0, POSITION_STD, generator=generator)
        else:
            fill_block_parameter(name, parameter, generator, self.layers_total)
