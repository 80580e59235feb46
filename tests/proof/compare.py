"""How far a layout is from one process, and how far it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from tests.proof.cases import Case, settings
from tests.proof.parallel import train_in_layout
from tests.proof.reference import Trained, train_alone
from tests.ranks import RankPool


@dataclass(frozen=True)
class Deviation:
    """Largest relative differences between a layout and one process."""

    loss: float
    """Over the losses of all steps and the held-out loss."""

    norm: float
    """Over the gradient norms of all steps."""

    parameters: float
    """Over all parameters: the largest difference of an element over the largest element of its parameter."""

    worst: str
    """The parameter where that is."""

    def within(self, limit: Deviation) -> bool:
        """Whether no number is over its limit; one that is not a number is."""
        pairs = ((self.loss, limit.loss), (self.norm, limit.norm), (self.parameters, limit.parameters))
        return all(value <= most for value, most in pairs)

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, parameters {self.parameters:.1e} ({self.worst})"


LIMITS = {
    # fp32 rounds by 6e-8; sums of a few hundred terms in another order, over four steps.
    "fp32": Deviation(2e-6, 1e-5, 1e-5, ""),
    # bf16 rounds by 4e-3 and fp16 by 5e-4 wherever a layout adds in another order; Adam turns a relative difference of
    # a small gradient into one of its update, which is 1 % of the largest weights here.
    "bf16": Deviation(1e-2, 5e-2, 5e-2, ""),
    "fp16": Deviation(1e-3, 5e-3, 1e-2, ""),
}


def deviation(ranks: RankPool, case: Case) -> Deviation:
    """Train a layout and one process, and compare."""
    return compare(train_in_layout(ranks, case.ranks, case.overrides), alone(case))


def alone(case: Case) -> Trained:
    """What one process makes of it; trained once for all layouts that must equal it."""
    return _alone(tuple(sorted(settings(case).items())))


@lru_cache(maxsize=None)
def _alone(values: tuple[tuple[str, object], ...]) -> Trained:
    return train_alone(dict(values))


def compare(trained: Trained, expected: Trained) -> Deviation:
    """Differences of a training from the expected one."""
    if trained.parameters.keys() != expected.parameters.keys():
        odd = sorted(trained.parameters.keys() ^ expected.parameters.keys())
        return Deviation(math.inf, math.inf, math.inf, f"only one of them has {', '.join(odd)}")
    losses = _largest([*trained.losses, trained.held_out], [*expected.losses, expected.held_out])
    apart = {
        name: _apart(trained.parameters[name], parameter) for name, parameter in expected.parameters.items()
    }
    worst = max(apart, key=lambda name: (math.isnan(apart[name]), apart[name]))
    return Deviation(losses, _largest(trained.norms, expected.norms), apart[worst], worst)


def _largest(values: list[float], expected: list[float]) -> float:
    if len(values) != len(expected):
        return math.inf
    return max(abs(value - right) / abs(right) for value, right in zip(values, expected, strict=True))


def _apart(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    if tensor.shape != expected.shape:
        return math.inf
    return float((tensor - expected).abs().max() / expected.abs().max())
