"""How many layers each pipeline stage gets; free of torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import accumulate

from dthpc.errors import UserError


def deal(costs: Sequence[float], stages: int) -> list[int]:
    """Deal layers to stages in order, so that the most expensive stage is as cheap as it can be.

    The slowest stage sets the pipeline's pace, so its cost comes first; of all dealings that are equal in it, the one
    with the least sum of squared stage costs is taken, and of those the one with fewer layers in front, where ranks
    hold most activations.

    Args:
        costs: of each layer, in order, in any unit; 0 or more.
        stages: number of stages.

    Returns:
        Number of layers of each stage, at least 1. The same costs give the same answer on every machine.

    Raises:
        UserError: there are fewer layers than stages, or a cost is negative or no number.
    """
    _check_enough(len(costs), stages)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise UserError(f"layer {layer} costs {cost}; a layer's cost is a number from 0 on", key="parallel.stages")
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    return _most_even(sums, stages, _least_bound(sums, stages))


def _least_bound(sums: list[float], stages: int) -> float:
    """The least cost that the most expensive stage can have; some run of layers costs just that.

    Args:
        sums: `sums[i]` is what the first i layers cost.
        stages: number of stages.
    """
    # A stage's share lies between the mean and the mean plus the most expensive layer, which bounds the search.
    layers, mean = len(sums) - 1, sums[-1] / stages
    widest = mean + max(sums[i + 1] - sums[i] for i in range(layers))
    runs: set[float] = set()
    for first in range(layers):
        low = max(first + 1, bisect.bisect_left(sums, sums[first] + mean * (1 - 1e-9)))
        high = bisect.bisect_right(sums, sums[first] + widest * (1 + 1e-9))
        runs.update(sums[last] - sums[first] for last in range(low, high))
    candidates = sorted(runs)
    return candidates[bisect.bisect_left(candidates, True, key=lambda bound: _fits(sums, stages, bound))]


def _fits(sums: list[float], stages: int, bound: float) -> bool:
    """Whether so many stages of at most this cost hold all layers, each stage taking as many as it can."""
    first, layers = 0, len(sums) - 1
    for _ in range(stages):
        first = _end(sums, first, bound)
        if first == layers:
            return True
    return False


def _end(sums: list[float], first: int, bound: float) -> int:
    """After the last layer that fits into a stage that begins with layer `first`."""
    end = bisect.bisect_right(sums, sums[first] + bound)
    # The sum on the right is rounded; the difference of two entries is what stages are compared by.
    while end < len(sums) and sums[end] - sums[first] <= bound:
        end += 1
    while sums[end - 1] - sums[first] > bound:
        end -= 1
    return end - 1


def _most_even(sums: list[float], stages: int, bound: float) -> list[int]:
    """The dealing with the least sum of squares among those whose stages cost at most `bound`."""
    layers = len(sums) - 1
    ends = [_end(sums, first, bound) for first in range(layers)]
    # best[i]: least sum of squares of layers i … in the stages looked at so far, from the last one forwards.
    best = {layers: 0.0}
    choices: list[dict[int, int]] = []
    for left in range(stages):
        better: dict[int, float] = {}
        choice: dict[int, int] = {}
        for first in range(stages - left - 1, layers - left):
            options = (
                ((sums[end] - sums[first]) ** 2 + best[end], end)
                for end in range(first + 1, ends[first] + 1)
                if end in best
            )
            least = min(options, default=None)
            if least is not None:
                better[first], choice[first] = least
        best = better
        choices.append(choice)
    counts, first = [], 0
    for choice in reversed(choices):
        counts.append(choice[first] - first)
        first = choice[first]
    return counts


def uniform(layers: int, stages: int) -> list[int]:
    """As many layers for each stage, as far as the number divides; the last stages get one more.

    Raises:
        UserError: there are fewer layers than stages.
    """
    _check_enough(layers, stages)
    return [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]


def by_hand(counts: Sequence[int], layers: int, stages: int) -> list[int]:
    """The number of layers of each stage as the user gives it, checked.

    Raises:
        UserError: it is not one whole number from 1 on for each stage, or they do not add up to the layers.
    """
    given = list(counts)
    example = ", ".join(map(str, uniform(layers, stages))) if layers >= stages else ""
    instead = f"for example parallel.stages=[{example}], or parallel.stages=auto" if example else None
    why = None
    if len(given) != stages:
        why = f"there are {stages} stages, but numbers of layers for {len(given)}"
    elif any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in given):
        why = "each stage needs a whole number of layers from 1 on"
    elif sum(given) != layers:
        why = f"the numbers add up to {sum(given)}, but the model has {layers} layers"
    if why is not None:
        raise UserError(why, key="parallel.stages", value=given, instead=instead)
    return given


def _check_enough(layers: int, stages: int) -> None:
    if layers < stages:
        raise UserError(
            f"the model has {layers} layers to deal, too few for {stages} pipeline stages",
            key="parallel.pp",
            instead=f"at most {layers} stages (parallel.pp times parallel.chunks), or a model with more layers",
        )
