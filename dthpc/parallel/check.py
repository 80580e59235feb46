"""Mistakes in `config.parallel`, against the ranks and everything the degrees must divide; free of torch."""

from __future__ import annotations

import math
from typing import Any

from dthpc.errors import UserError


def degrees_of(parallel: Any, world_size: int) -> dict[str, int]:
    """The degree of each axis on that many ranks, for degrees that `check` has let pass."""
    fixed = {axis: int(parallel[axis]) for axis in ("pp", "cp", "tp")}
    dp = world_size // math.prod(fixed.values())
    replicate = dp if parallel.zero == 0 else parallel.get("replicate") or 1
    return {**fixed, "replicate": replicate, "shard": dp // replicate}


def check(config: Any, world_size: int | None = None) -> list[UserError]:
    """Mistakes in `config.parallel`.

    Args:
        config: the whole configuration.
        world_size: ranks in all; None: every number of ranks that `config.cluster` may start.
    """
    raise NotImplementedError
