"""A small residual convolutional network."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.errors import UserError

GROUPS = 8
"""Groups of channels that are normalised together."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, each after a norm (He et al. 2016, "Identity mappings").

    GroupNorm (Wu and He 2018) and not BatchNorm: statistics of a batch depend on how samples are dealt to ranks and
    micro-batches, so the same step would give another result in each layout.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(GROUPS, channels_in)
        self.first = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        changes = stride > 1 or channels_in != channels
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, channels_in, H, W]` to `[B, channels, H / stride, W / stride]`."""
        kept = x if self.shortcut is None else self.shortcut(x)
        x = self.first(F.relu(self.first_norm(x)))
        after: Tensor = kept + self.second(F.relu(self.second_norm(x)))
        return after


class ConvNet(nn.Module):
    """Images `[B, C, H, W]` of any size to class scores `[B, classes]`; for data parallelism and ZeRO."""

    def __init__(
        self, *, channels: int = 1, classes: int = 10, width: int = 32, depths: tuple[int, ...] = (1, 1)
    ) -> None:
        """Build the model; its parameters hold no values worth using before `init_parameters`.

        Args:
            channels: of an image.
            classes: number of classes.
            width: channels of the first stage, a multiple of 8; each further one has twice as many, on half the pixels
                a side.
            depths: residual blocks of each stage.

        Raises:
            UserError: the width does not divide into groups.
        """
        super().__init__()
        if width < 1 or width % GROUPS:
            raise UserError(
                f"channels are normalised in {GROUPS} groups",
                key="model.width",
                value=width,
                instead=f"model.width={max(1, round(width / GROUPS)) * GROUPS}",
            )
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleDict()
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                self.blocks[f"{stage}_{number}"] = ResidualBlock(channels, width << stage, stride)
                channels = width << stage
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes: float `[B, C, H, W]` to `[B, classes]`, fp32 or the autocast dtype."""
        x = self.stem(images)
        for block in self.blocks.values():
            x = block(x)
        scores: Tensor = self.head(F.relu(self.norm(x)).mean(dim=(2, 3)))
        return scores

    @torch.no_grad()
    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter with its initial values, drawn from `generator` alone.

        Convolutions are normal with variance 2 / fan-in (He et al. 2015, "Delving deep into rectifiers", eq. 10), the
        classifier with 1 / fan-in. Norms start at one, biases at zero.
        """
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            gain = 2.0 if parameter.dim() == 4 else 1.0
            parameter.normal_(0.0, math.sqrt(gain / parameter[0].numel()), generator=generator)
