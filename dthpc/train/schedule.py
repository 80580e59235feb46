"""Learning rate as a pure function of the step, so that a resumed run needs no state for it. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dthpc.errors import UserError, nearest

SCALINGS = ("linear", "sqrt")


def learning_rate(optim: Any, train: Any) -> Callable[[int], float]:
    """The rate of each update: a function of the number of updates made before it, from 0.

    Args:
        optim: the `optim` group of the configuration, which is read here once and not in every step.
        train: the `train` group: updates of the whole run, and samples of one step.
    """
    peak, steps = peak_rate(optim, train.global_batch), train.steps
    schedule = {name: optim.schedule[name] for name in ("name", "warmup_steps", "min_ratio", "decay_fraction")}
    return lambda step: peak * ratio(step, steps, **schedule)


def peak_rate(optim: Any, global_batch: int) -> float:
    """The rate that the schedule is a fraction of.

    `linear` multiplies by k = global batch / base batch, since k steps of a small batch move the weights about as far
    as one step of a k times larger one with k times the rate (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 2.1). An adaptive optimizer divides by the gradient's size, whose noise falls with the root of k: `sqrt`
    (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
    """
    peak, rule = float(optim.lr), optim.get("scale_lr")
    if rule is None:
        return peak
    factor = global_batch / optim.base_batch
    return peak * (factor if rule == "linear" else math.sqrt(factor))


def check(config: Any) -> list[UserError]:
    """Mistakes in how the learning rate follows the batch size."""
    return list(_find_mistakes(config.optim, config.train.global_batch))


def _find_mistakes(optim: Any, global_batch: int) -> Iterator[UserError]:
    rule, base = optim.get("scale_lr"), optim.get("base_batch")
    if rule is not None and rule not in SCALINGS:
        yield UserError("no such rule", key="optim.scale_lr", value=rule, instead=nearest(str(rule), SCALINGS))
    if base is not None and base < 1:
        yield UserError(
            "a batch has at least 1 sample",
            key="optim.base_batch",
            value=base,
            instead=f"optim.base_batch={global_batch}",
        )
    elif (rule is None) != (base is None):
        yield UserError(
            "the rate follows the batch size by a rule, from the batch size for which optim.lr was found: give both",
            key="optim.scale_lr" if base is None else "optim.base_batch",
            value=rule if base is None else base,
            instead=f"optim.base_batch={global_batch} beside it, or whatever batch the rate was found for"
            if base is None
            else "optim.scale_lr=linear (SGD) or sqrt (Adam) beside it, or neither",
        )


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
