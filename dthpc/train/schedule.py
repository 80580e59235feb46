"""Learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def learning_rate(optim: Any, steps: int) -> Callable[[int], float]:
    """The rate of each update: a function of the number of updates made before it, from 0.

    Args:
        optim: the `optim` group of the configuration, which is read here once and not in every step.
        steps: updates of the whole run.
    """
    peak: float = optim.lr
    schedule = {name: optim.schedule[name] for name in ("name", "warmup_steps", "min_ratio", "decay_fraction")}
    return lambda step: peak * ratio(step, steps, **schedule)


def ratio(
    step: int,
    steps: int,
    *,
    name: str,
    warmup_steps: int | None = None,
    min_ratio: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """The rate of one update over the peak rate, in (0, 1].

    All schedules rise linearly over the first `warmup_steps` updates (None: a twentieth of all, at most 2000), the
    first of which is already made with 1/warmup_steps. Then `constant` stays; `linear` and `cosine` (Loshchilov and
    Hutter 2016) fall to `min_ratio` at the end; `wsd` (Hu et al. 2024, "MiniCPM") stays until its last `decay_fraction`
    of all steps, and then falls linearly.
    """
    if warmup_steps is None:
        warmup_steps = min(steps // 20, 2000)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    start = warmup_steps
    if name == "wsd":
        start = max(warmup_steps, steps - round(steps * decay_fraction))
    if name == "constant" or step < start:
        return 1.0
    done = min(1.0, (step - start) / max(1, steps - start))
    left = 0.5 * (1 + math.cos(math.pi * done)) if name == "cosine" else 1 - done
    return min_ratio + (1 - min_ratio) * left
