"""How far a layout is from one process, and how far it may be."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache

import torch

from tests.proof.cases import Case, settings
from tests.proof.parallel import train_in_layout
from tests.proof.reference import RATES, Trained, train_alone
from tests.ranks import RankPool


@dataclass(frozen=True)
class Deviation:
    """Largest relative differences between a layout and one process."""

    loss: float
    """Over the losses of all steps and the held-out loss."""

    norm: float
    """Over the gradient norms of all steps."""

    parameters: float
    """Over all elements of all parameters: the difference, over what the element's parameter can be expected to be
    known to: its largest element, or the sum of the learning rates, which is about how far steps move it."""

    worst: str = ""
    """The parameter where that is."""

    split: str = ""
    """Which ranks tell other losses or norms than the first."""

    def beyond(self, limit: Deviation) -> list[str]:
        """What is over its limit, or is not a number: one sentence for each."""
        told = [f"{self.split} tell other numbers than rank 0"] if self.split else []
        for what in ("loss", "norm", "parameters"):
            value, most = getattr(self, what), getattr(limit, what)
            if not value <= most:
                where = f", most of all in {self.worst}" if what == "parameters" else ""
                told.append(f"{what} deviates by {value:.1e}, and the limit is {most:.0e}{where}")
        return told

    def within(self, limit: Deviation) -> bool:
        """Whether nothing is over its limit."""
        return not self.beyond(limit)

    def __str__(self) -> str:
        told = f"loss {self.loss:.1e}, norm {self.norm:.1e}, parameters {self.parameters:.1e} ({self.worst})"
        return f"{told}; {self.split} differ" if self.split else told


# fp32 rounds by 6e-8, and a layout adds up a few hundred products in another order than one process. Losses and norms
# are means over many of them. A parameter has gone through four updates, in which Adam divides a gradient by its size:
# a relative difference of a small gradient is one of its whole update.
FP32 = Deviation(1e-6, 2e-6, 5e-6)

# bf16 rounds by 4e-3, wherever a layout adds in another order. Any two trainings in it are about as far apart as each
# of them is from the same one in fp32: for one process up to 6e-5, 3e-3 and 6e-2 (`test_compare.py` measures it). A
# layout that stays as near to one process makes no mistake that its number format does not make already.
BF16 = Deviation(4e-4, 8e-3, 8e-2)

# fp16 has three more binary digits.
FP16 = Deviation(BF16.loss / 8, BF16.norm / 8, BF16.parameters / 8)

LIMITS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def limit_of(case: Case) -> Deviation:
    """How far a layout may be from one process."""
    return LIMITS[case.arithmetic]


def deviation(ranks: RankPool, case: Case, mistake: str | None = None) -> Deviation:
    """Train a layout and one process, and compare; without a mistake a layout is trained once for all who ask.

    Args:
        ranks: where to train.
        case: the layout.
        mistake: one of `tests.proof.mistakes`, which the ranks make.
    """
    if mistake is None:
        return _without_mistake(ranks, case)
    return compare(train_in_layout(ranks, case.ranks, case.overrides, mistake), alone(case))


@cache
def _without_mistake(ranks: RankPool, case: Case) -> Deviation:
    return compare(train_in_layout(ranks, case.ranks, case.overrides), alone(case))


def alone(case: Case) -> Trained:
    """What one process makes of it; trained once for all layouts that must equal it."""
    return _alone(json.dumps(settings(case), sort_keys=True))


@cache
def _alone(values: str) -> Trained:
    return train_alone(json.loads(values))


def compare(trained: Trained, expected: Trained) -> Deviation:
    """Differences of a training from the expected one."""
    if trained.parameters.keys() != expected.parameters.keys():
        odd = sorted(trained.parameters.keys() ^ expected.parameters.keys())
        return Deviation(math.inf, math.inf, math.inf, f"only one of them has {', '.join(odd)}")
    split = [str(rank) for rank, other in enumerate(trained.others, start=1) if _told(other) != _told(trained)]
    everyone = [trained, *trained.others]
    loss = max(_largest([*each.losses, each.held_out], [*expected.losses, expected.held_out]) for each in everyone)
    norm = max(_largest(each.norms, expected.norms) for each in everyone)
    apart = {name: _apart(trained.parameters[name], parameter) for name, parameter in expected.parameters.items()}
    worst = max(apart, key=lambda name: (math.isnan(apart[name]), apart[name]))
    return Deviation(loss, norm, apart[worst], worst, f"ranks {', '.join(split)}" if split else "")


def _told(trained: Trained) -> str:
    """All numbers that a rank told, bit for bit; NaN is like NaN."""
    return repr((trained.losses, trained.norms, trained.held_out))


def _largest(values: list[float], expected: list[float]) -> float:
    """Largest relative difference; two values of which neither is finite are equal."""
    if len(values) != len(expected):
        return math.inf
    pairs = [pair for pair in zip(values, expected, strict=True) if any(map(math.isfinite, pair))]
    differences = [abs(value - right) / abs(right) for value, right in pairs]
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=0.0)


def _apart(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    if tensor.shape != expected.shape:
        return math.inf
    return float((tensor - expected).abs().max()) / max(float(expected.abs().max()), sum(RATES))
