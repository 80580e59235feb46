"""The layouts that are held against one process: every feature alone, all pairs and all triples that fit 8 ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

MOST_RANKS = 8
IN_CI = 220
"""Layouts that every run of the tests holds against one process."""

PIPELINE = {"parallel.pp": 2}
FEATURES: dict[str, dict[str, Any]] = {
    # Data parallelism: at most one of these.
    "dp": {"parallel.zero": 0},
    "zero1": {"parallel.zero": 1},
    "zero2": {"parallel.zero": 2},
    "zero3": {"parallel.zero": 3},
    "hsdp": {"parallel.zero": 3, "parallel.replicate": 2},
    # Tensor parallelism.
    "tp": {"parallel.tp": 2},
    "sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    # Pipelines.
    "gpipe": {**PIPELINE, "parallel.schedule": "gpipe"},
    "1f1b": {**PIPELINE, "parallel.schedule": "1f1b"},
    "interleaved": {**PIPELINE, "parallel.schedule": "interleaved"},
    "zb_h1": {**PIPELINE, "parallel.schedule": "zb_h1"},
    "zbv": {**PIPELINE, "parallel.schedule": "zbv"},
    # How a step is cut. 16 samples are 8 or 4 for a rank; the other numbers leave ranks with different shares.
    "accumulate2": {"passes": 2},
    "accumulate4": {"passes": 4},
    "uneven": {"train.global_batch": 13},
    # What is computed again.
    "recompute": {"parallel.activations.mode": "full"},
    "selective": {"parallel.activations.mode": "selective"},
    # What follows the gradients.
    "clip": {"train.grad_clip": 0.05},
    # Models.
    "tied": {"model.tie_embeddings": True},
    "odd": {"data.vocab_size": 37, "model.hidden": 25},
    "classic": {"model.norm": "layer", "model.position": "learned", "model.mlp": "gelu", "model.kv_heads": 4},
    "dropout": {"model.dropout": 0.25},
    # Number formats.
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "bf16s": {"precision.compute": "bf16", "precision.parameters": "compute"},
    # Where states lie.
    "offload": {"parallel.offload.optimizer": "cpu"},
    "nvme": {"parallel.offload.optimizer": "nvme"},
    # How ranks are numbered.
    "reorder": {"parallel.order": ["tp", "shard", "cp", "replicate", "pp"]},
}
KINDS: list[tuple[str, ...]] = [
    ("dp", "zero1", "zero2", "zero3", "hsdp"),
    ("tp", "sp"),
    ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv"),
    ("accumulate2", "accumulate4"),
    ("recompute", "selective"),
    ("bf16", "fp16", "bf16s"),
    ("offload", "nvme"),
]
"""Features of which a layout has one at most."""

RANKS = {"dp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4, "tp": 2, "sp": 2, **dict.fromkeys(KINDS[2], 2)}


@dataclass(frozen=True)
class Case:
    """One layout, as a set of features."""

    features: tuple[str, ...]
    """In the order of `FEATURES`."""

    def __str__(self) -> str:
        return " ".join(self.features)

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        product = 1
        for feature in self.features:
            product *= RANKS.get(feature, 1)
        return product

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """Values of the configuration under their keys."""
        merged: dict[str, Any] = {}
        for feature in self.features:
            merged.update(FEATURES[feature])
        passes = merged.pop("passes", None)
        if passes is not None:
            dp = next((RANKS[feature] for feature in self.features if feature in KINDS[0]), 1)
            merged["train.micro_batch"] = -(-merged.get("train.global_batch", 16) // dp // passes)
        return merged

    @property
    def arithmetic(self) -> str:
        """Number format of the arithmetic."""
        return str(self.overrides.get("precision.compute", "fp32"))


def fits(features: tuple[str, ...]) -> bool:
    """Whether the features go together: one of a kind, and no more ranks than there are."""
    if any(sum(feature in kind for feature in features) > 1 for kind in KINDS):
        return False
    case = Case(features)
    if "reorder" in features and case.ranks < 4:
        return False  # with one axis there is no order
    return case.ranks <= MOST_RANKS


def all_cases(most: int = 3) -> Iterator[Case]:
    """Every feature alone, all pairs, all triples …, without those that leave one process as it is."""
    for count in range(1, most + 1):
        for features in combinations(FEATURES, count):
            if fits(features):
                yield Case(features)


def chosen_cases(count: int = IN_CI, seed: int = 0) -> list[Case]:
    """Layouts for every run of the tests: each feature alone, then richer ones until `count`, greedily.

    Each is the one of some random ones, of up to six features, that has most triples that no layout before it has.
    """
    draw = random.Random(seed)
    cases = [Case(features) for features in combinations(FEATURES, 1) if fits(features)]
    wanted = {triple for triple in combinations(FEATURES, 3) if fits(triple)}
    seen = set(cases)
    while len(cases) < count:
        found = max((_random_case(draw) for _ in range(60)), key=lambda case: len(wanted & _triples(case)))
        if found not in seen:
            seen.add(found)
            cases.append(found)
            wanted -= _triples(found)
    return cases


def covered(cases: list[Case], size: int) -> tuple[int, int]:
    """How many of the sets of `size` features that fit occur in some layout, and how many there are."""
    wanted = {each for each in combinations(FEATURES, size) if fits(each)}
    found = {each for case in cases for each in combinations(case.features, size)}
    return len(wanted & found), len(wanted)


def settings(case: Case) -> Mapping[str, Any]:
    """What decides the result of one process: the overrides that are no matter of layout."""
    ignored = ("parallel.", "train.micro_batch", "precision.parameters")
    return {key: value for key, value in case.overrides.items() if not key.startswith(ignored)}


def _random_case(draw: random.Random) -> Case:
    names = list(FEATURES)
    while True:
        picked = set(draw.sample(names, draw.randint(3, 6)))
        features = tuple(name for name in names if name in picked)
        if fits(features) and Case(features).ranks > 1:
            return Case(features)


def _triples(case: Case) -> set[tuple[str, ...]]:
    return set(combinations(case.features, 3))
