"""The layouts that are held against one process: every feature alone, all pairs and all triples that fit 8 ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

MOST_RANKS = 8
IN_CI = 220
"""Generated layouts that every run of the tests holds against one process, beside the picked ones."""

OVER_MPI = 48
"""Of these, the layouts that every run of the tests also trains over MPI."""

DATA, TENSOR, PIPELINE, PASSES, AGAIN, FORMAT, STATES = (
    "data",
    "tensor",
    "pipeline",
    "passes",
    "again",
    "format",
    "states",
)


@dataclass(frozen=True)
class Feature:
    """One thing that a layout may have."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the configuration under their keys."""

    kind: str | None = None
    """A layout has at most one of a kind."""

    dp: int = 1
    """Data-parallel ranks."""

    others: int = 1
    """Factor of all other ranks."""

    needs: tuple[str, ...] = ()
    """Features of which one must be there, for this one to change anything."""

    passes: int | None = None
    """Micro-batches of a step, on the ranks with the largest share."""


def _data(zero: int, ranks: int = 2, replicate: int | None = None) -> Feature:
    return Feature({"parallel.zero": zero, "parallel.replicate": replicate}, DATA, dp=ranks)


def _pipeline(schedule: str, ranks: int = 2, layers: int = 4, **more: Any) -> Feature:
    values = {"parallel.pp": ranks, "parallel.schedule": schedule, "model.layers": layers}
    return Feature({**values, **{f"parallel.{key}": value for key, value in more.items()}}, PIPELINE, others=ranks)


def _precision(**values: Any) -> Feature:
    return Feature({f"precision.{key}": value for key, value in values.items()}, FORMAT)


ALL_DATA = ("dp", "zero1", "zero2", "zero3", "hsdp", "dp3", "zero1x3", "zero2x3", "zero3x3")
FEATURES: dict[str, Feature] = {
    "dp": _data(0),
    "zero1": _data(1),
    "zero2": _data(2),
    "zero3": _data(3),
    "hsdp": _data(3, ranks=4, replicate=2),
    "tp": Feature({"parallel.tp": 2}, TENSOR, others=2),
    "sp": Feature({"parallel.tp": 2, "parallel.sequence_parallel": True}, TENSOR, others=2),
    # By default a pipeline makes at most 4·pp micro-batches, here 8 of two samples each.
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved"),
    "zb_h1": _pipeline("zb_h1"),
    "zbv": _pipeline("zbv"),
    # With a pipeline these are m = p and m = 2p.
    "accumulate2": Feature(kind=PASSES, passes=2),
    "accumulate4": Feature(kind=PASSES, passes=4),
    # Shares of ranks and micro-batches differ, and in a pipeline some are empty.
    "uneven": Feature({"train.global_batch": 13}),
    "recompute": Feature({"parallel.activations.mode": "full"}, AGAIN),
    "selective": Feature({"parallel.activations.mode": "selective"}, AGAIN),
    "clip": Feature({"train.grad_clip": 0.05}),
    "tied": Feature({"model.tie_embeddings": True}),
    # Neither the vocabulary nor the hidden width divides among any ranks.
    "odd": Feature({"data.vocab_size": 37, "model.hidden": 25}),
    "classic": Feature({"model.norm": "layer", "model.position": "learned", "model.mlp": "gelu", "model.kv_heads": 4}),
    "dropout": Feature({"model.dropout": 0.25}),
    "bf16": _precision(compute="bf16"),
    "fp16": _precision(compute="fp16"),
    # The matrices and their gradients, too, are held in 16 bits.
    "bf16s": _precision(compute="bf16", parameters="compute"),
    # The first step has one target alone, whose gradient overflows at this scale; no other step's does.
    "overflow": Feature({"precision.compute": "fp16", "precision.loss_scale": 2.0**18, "data.lonely": True}, FORMAT),
    "bf16travel": Feature({"parallel.gradients.dtype": "bf16"}, needs=ALL_DATA),
    "offload": Feature({"parallel.offload.optimizer": "cpu"}, STATES),
    "nvme": Feature({"parallel.offload.optimizer": "nvme"}, STATES),
    "parameters": Feature(
        {"parallel.offload.parameters": "cpu", "parallel.offload.optimizer": "cpu"}, STATES, needs=("zero3", "hsdp")
    ),
    "reorder": Feature({"parallel.order": ["tp", "shard", "cp", "replicate", "pp"]}),
}
"""What the generated layouts are made of."""

SIZES = {
    "image_size": 8,
    "patch_size": 4,
    "channels": 1,
    "classes": 10,
    "dim": 16,
    "layers": 4,
    "heads": 4,
    "hidden": 24,
    "dropout": 0.0,
}
IMAGES = {"_target_": "tests.proof.data.Images"}
SPECIAL: dict[str, Feature] = {
    # Numbers of ranks that are no power of two, and more of them.
    "dp3": _data(0, ranks=3),
    "zero1x3": _data(1, ranks=3),
    "zero2x3": _data(2, ranks=3),
    "zero3x3": _data(3, ranks=3),
    "replicate3": _data(3, ranks=6, replicate=3),
    "shard3": _data(3, ranks=6, replicate=2),
    "zero1r2": _data(1, ranks=4, replicate=2),
    "zero2r2": _data(2, ranks=4, replicate=2),
    "tp3": Feature({"parallel.tp": 3, "model.dim": 24, "model.heads": 6, "model.kv_heads": 3}, TENSOR, others=3),
    "tp4": Feature({"parallel.tp": 4, "model.kv_heads": 4}, TENSOR, others=4),
    "sp4": Feature({"parallel.tp": 4, "model.kv_heads": 4, "parallel.sequence_parallel": True}, TENSOR, others=4),
    **{f"{name}x4": _pipeline(name, 4) for name in ("gpipe", "1f1b", "zb_h1")},
    **{f"{name}x4": _pipeline(name, 4, 8) for name in ("interleaved", "zbv")},
    "1f1bx3": _pipeline("1f1b", 3),
    "zbvx3": _pipeline("zbv", 3, 6),
    # Three chunks of layers on each rank.
    "chunks3": _pipeline("interleaved", 2, 6, chunks=3),
    # Stages cut by hand, and one micro-batch that goes through them layer by layer.
    "staged": _pipeline("1f1b", 2, stages=[1, 3]),
    "naive": Feature({"parallel.pp": 2, "parallel.schedule": "gpipe"}, PIPELINE, others=2, passes=1),
    "fp16s": _precision(compute="fp16", parameters="compute"),
    # Parameter shards in files.
    "files": Feature({"parallel.offload.parameters": "nvme"}, STATES, needs=("zero3", "hsdp", "zero3x3")),
    # Ranks of one host that do not use the memory that they could share.
    "wire": Feature({"comm.shared_memory": False}),
    # Other models, on images.
    "vit": Feature({"model": {"_target_": "dthpc.models.vit.ViT", **SIZES}, "data": IMAGES}),
    "conv": Feature({"model": {"_target_": "dthpc.models.convnet.ConvNet", "width": 8}, "data": IMAGES}),
}
"""What only picked layouts have."""

PICKED = (
    *("dp3", "dp3 accumulate2 uneven", "zero1x3", "zero1x3 bf16s", "zero2x3 accumulate2 uneven", "zero3x3"),
    *("zero3x3 tp clip", "zero3x3 odd tied dropout", "zero2x3 1f1b tied", "zero3x3 files", "zero1x3 nvme"),
    *("replicate3 uneven", "shard3 clip", "shard3 bf16s accumulate2", "zero1r2 tp", "zero2r2 accumulate2 uneven"),
    *("tp3", "tp3 odd tied", "tp3 1f1b", "tp4", "tp4 classic dropout", "tp4 zero3", "sp4", "sp4 classic dropout"),
    *("sp4 1f1b tied", "tp4 bf16", "gpipex4", "gpipex4 tied accumulate4", "1f1bx4 uneven", "1f1bx4 zero1 tied"),
    *("zb_h1x4 accumulate4", "zb_h1x4 tied uneven", "interleavedx4 tied", "interleavedx4 zero2", "zbvx4 dropout"),
    *("zbvx4 tied clip", "1f1bx3 tied", "1f1bx3 zero3 uneven", "zbvx3", "zbvx3 tp", "chunks3", "chunks3 zero2 tied"),
    *("chunks3 sp recompute", "staged", "staged zero3", "naive", "naive tied dropout", "fp16s", "zero2 fp16s"),
    *("dp wire", "dp3 wire uneven", "zero1 wire tied", "zero2 wire accumulate2", "zero3 wire clip", "hsdp wire bf16s"),
    *("zero3x3 wire dropout tied", "tp wire", "sp zero3 wire", "zero2 1f1b wire uneven"),
    *("zero3 tp fp16s", "zero3 files", "hsdp files bf16s", "zero3 files recompute 1f1b"),
)
"""Layouts chosen by hand, beside those of the other models."""

ONLY_DECODER = {"tied", "odd", "classic", "overflow", "bf16travel", "reorder", "parameters"}
NOT_CONV = {*ONLY_DECODER, "tp", "sp", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "selective", "dropout"}
IMAGE_TRIPLES = (
    *("vit hsdp tp", "vit zero3 sp dropout", "vit zero2 1f1b clip", "vit sp zbv uneven", "conv zero3 bf16 clip"),
    *("conv zero2 accumulate2 uneven", "conv hsdp recompute", "vit zero1 sp interleaved"),
)


@dataclass(frozen=True)
class Case:
    """One layout, as a set of features."""

    features: tuple[str, ...]
    """Their names."""

    @classmethod
    def of(cls, words: str) -> Case:
        """From names with blanks between them."""
        return cls(tuple(words.split()))

    def __str__(self) -> str:
        return " ".join(self.features)

    @property
    def _parts(self) -> list[Feature]:
        return [FEATURES[name] if name in FEATURES else SPECIAL[name] for name in self.features]

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        product = 1
        for part in self._parts:
            product *= part.dp * part.others
        return product

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """Values of the configuration under their keys; a whole group comes before what changes it."""
        merged: dict[str, Any] = {}
        for part in self._parts:
            merged.update(part.values)
        passes = next((part.passes for part in self._parts if part.passes is not None), None)
        if passes is not None:
            dp = next((part.dp for part in self._parts if part.kind == DATA), 1)
            merged["train.micro_batch"] = -(-merged.get("train.global_batch", 16) // dp // passes)
        return dict(sorted(merged.items(), key=lambda entry: "." in entry[0]))

    @property
    def arithmetic(self) -> str:
        """The coarsest number format that sums over ranks or samples are rounded to: fp32, bf16 or fp16."""
        if self.overrides.get("parallel.gradients.dtype") == "bf16":
            return "bf16"
        return str(self.overrides.get("precision.compute", "fp32"))

    @property
    def fits(self) -> bool:
        """Whether the features go together: one of a kind, each with what it needs, and on no more ranks than there
        are."""
        kinds = [part.kind for part in self._parts if part.kind is not None]
        if len(kinds) > len(set(kinds)) or self.ranks > MOST_RANKS:
            return False
        if any(part.needs and not set(part.needs) & set(self.features) for part in self._parts):
            return False
        # With one axis there is no order.
        return "reorder" not in self.features or self.ranks >= 4


def all_cases(most: int = 3) -> Iterator[Case]:
    """Every feature alone, all pairs, all triples …, without those that do not fit."""
    for count in range(1, most + 1):
        for features in combinations(FEATURES, count):
            case = Case(features)
            if case.fits:
                yield case


def picked_cases() -> list[Case]:
    """The layouts chosen by hand, and each other model with every feature alone that it allows."""
    alone = [
        Case((model, name))
        for model, without in (("vit", ONLY_DECODER), ("conv", NOT_CONV))
        for name in FEATURES
        if name not in without
    ]
    return [Case.of(words) for words in PICKED] + alone + [Case.of(words) for words in IMAGE_TRIPLES]


def generated_cases(count: int = IN_CI, seed: int = 0) -> list[Case]:
    """Each feature alone, then richer ones until `count`, greedily.

    Each is the one of some random ones, of up to six features, that has most triples that no layout before it has.
    """
    draw = random.Random(seed)
    cases = list(all_cases(1))
    wanted = {case.features for case in all_cases(3) if len(case.features) == 3}
    seen = set(cases)
    while len(cases) < count:
        found = max((_random_case(draw) for _ in range(100)), key=lambda case: len(wanted & _sets(case, 3)))
        if found not in seen:
            seen.add(found)
            cases.append(found)
            wanted -= _sets(found, 3)
    return cases


def chosen_cases() -> list[Case]:
    """The layouts of every run of the tests."""
    return generated_cases() + picked_cases()


def cases_over_mpi(count: int = OVER_MPI) -> list[Case]:
    """Layouts of several ranks among the chosen ones that have every feature between them, and many pairs of features.

    Each is the one that brings most features that no layout before it has, then most such pairs, on fewest ranks.
    """
    left = [case for case in chosen_cases() if case.ranks > 1]
    cases: list[Case] = []
    features: set[tuple[str, ...]] = set()
    pairs: set[tuple[str, ...]] = set()
    while len(cases) < count:
        best = max(left, key=lambda case: (len(_sets(case, 1) - features), len(_sets(case, 2) - pairs), -case.ranks))
        left.remove(best)
        cases.append(best)
        features |= _sets(best, 1)
        pairs |= _sets(best, 2)
    return cases


def covered(cases: list[Case], size: int) -> tuple[int, int]:
    """How many of the sets of `size` features that fit occur in some layout, and how many there are."""
    wanted = {case.features for case in all_cases(size) if len(case.features) == size}
    found = {each for case in cases for each in _sets(case, size)}
    return len(wanted & found), len(wanted)


def settings(case: Case) -> dict[str, Any]:
    """What decides the result of one process: the overrides that are no matter of layout."""
    ignored = ("parallel.", "train.micro_batch", "precision.parameters")
    return {key: value for key, value in case.overrides.items() if not key.startswith(ignored)}


def _random_case(draw: random.Random) -> Case:
    names = list(FEATURES)
    while True:
        picked = set(draw.sample(names, draw.randint(3, 6)))
        case = Case(tuple(name for name in names if name in picked))
        if case.fits and case.ranks > 1:
            return case


def _sets(case: Case, size: int) -> set[tuple[str, ...]]:
    return set(combinations(case.features, size))
