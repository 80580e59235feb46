"""What a layout and a configuration ask of the sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardOptions:
    """How states are held and reduced over data-parallel ranks."""

    zero: int = 0
    """ZeRO stage (Rajbhandari et al. 2020): 0, 1, 2 or 3."""

    bucket_bytes: int = 25 << 20
    """A bucket is closed when it holds as much."""

    storage: torch.dtype = torch.float32
    """Format in which matrices and their gradients are held: fp32, or a 16-bit one beside fp32 masters."""

    gradient_dtype: torch.dtype | None = None
    """Format in which fp32 gradients travel over data-parallel ranks; None: as they are."""

    powersgd_rank: int = 0
    """Rank of PowerSGD's approximation of each matrix (Vogels et al. 2019); 0: whole gradients."""

    allow_unused: bool = False
    """Whether parameters may get no gradient in the first step."""

    stages_alone: bool = False
    """Whether pipeline ranks finish steps at times of their own (`pipedream`), so that none waits for all of them."""
