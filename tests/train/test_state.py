"""Trainings by the real job, interrupted in one layout and resumed in another."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dthpc.parallel.layout import Layout
from dthpc.parallel.parts import Part, Piece
from dthpc.train.state import TrainState, _layout_words, shares_of
from tests.ranks import pool
from tests.train.state_tasks import SAVED, STEPS, restore_frozen, train, whole_state

Layouts = dict[str, tuple[int, dict[str, Any]]]

LAYOUTS: Layouts = {
    "one process": (1, {}),
    "zero 1": (3, {"parallel.zero": 1}),
    "zero 3, tp": (4, {"parallel.zero": 3, "parallel.tp": 2}),
    "interleaved": (2, {"parallel.pp": 2, "parallel.schedule": "interleaved"}),
    "hsdp": (4, {"parallel.zero": 2, "parallel.replicate": 2}),
    "tp, sp": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "1f1b, zero 1": (4, {"parallel.pp": 2, "parallel.zero": 1}),
    "offload to files": (2, {"parallel.zero": 1, "parallel.offload.optimizer": "nvme"}),
}

OTHERS: Layouts = {
    "fp16": (2, {"precision.compute": "fp16", "precision.parameters": "compute", "parallel.zero": 1}),
    "powersgd": (2, {"parallel.gradients.powersgd_rank": 1}),
    "replicas": (2, {"parallel.outer.every": 2}),
    "replicas, late": (2, {"parallel.outer.every": 2, "parallel.outer.delay": 1}),
}


def changes(layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**layout, "parallel.offload.folder": str(folder)}


def interrupted(source: Path, target: Path) -> Path:
    """A run as it was when it was interrupted after its first checkpoint."""
    shutil.copytree(source / "checkpoints" / f"step-{SAVED:08d}", target / "checkpoints" / f"step-{SAVED:08d}")
    return target


def last(folder: Path) -> dict[str, torch.Tensor]:
    return whole_state(folder / "checkpoints" / f"step-{STEPS:08d}")


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """A run without interruption in each layout, and its losses."""
    runs = {}
    for name, (ranks, layout) in {**LAYOUTS, **OTHERS}.items():
        folder = tmp_path_factory.mktemp("run")
        runs[name] = folder, pool().run(ranks, train, str(folder), 0, changes(layout, folder))[0]
    return runs


@pytest.mark.parametrize("name", [*LAYOUTS, *OTHERS])
def test_resumed_in_its_own_layout_a_run_ends_bitwise_as_without_the_interruption(
    whole_runs: dict[str, tuple[Path, list[float]]], tmp_path: Path, name: str
) -> None:
    folder, losses = whole_runs[name]
    ranks, layout = {**LAYOUTS, **OTHERS}[name]
    again = pool().run(ranks, train, str(interrupted(folder, tmp_path)), 1, changes(layout, tmp_path))[0]
    assert again == losses[SAVED:]
    first, second = last(folder), last(tmp_path)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.parametrize(("source", "target"), [*pairwise(LAYOUTS), ("offload to files", "one process")])
def test_resumed_in_another_layout_a_run_ends_within_rounding(
    whole_runs: dict[str, tuple[Path, list[float]]], tmp_path: Path, source: str, target: str
) -> None:
    folder, losses = whole_runs[source]
    ranks, layout = LAYOUTS[target]
    again = pool().run(ranks, train, str(interrupted(folder, tmp_path)), 1, changes(layout, tmp_path))[0]
    assert again == pytest.approx(losses[SAVED:], rel=1e-5)
    first, second = last(folder), last(tmp_path)
    assert first.keys() == second.keys()
    far = {key: float((first[key] - second[key]).abs().max() / first[key].abs().max()) for key in first}
    assert {key: error for key, error in far.items() if error > 1e-4} == {}


def test_the_scale_of_fp16_is_part_of_the_state(whole_runs: dict[str, tuple[Path, list[float]]]) -> None:
    folder, _ = whole_runs["fp16"]
    records = json.loads((folder / "checkpoints" / f"step-{SAVED:08d}" / "records.json").read_text())
    assert records["stateful"]["scaler"]
    assert records["stateful"]["train"] == {"step": SAVED, "samples": 8 * SAVED}


def test_parameters_that_are_not_trained_are_saved_too(tmp_path: Path) -> None:
    for frozen, equal in pool().run(2, restore_frozen, str(tmp_path)):
        assert frozen == ["0.weight", "0.bias"]
        assert equal


def test_the_state_survives_json() -> None:
    state, other = TrainState(step=7, samples=56), TrainState()
    other.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert other == state


def test_pieces_are_shares_in_the_coordinates_of_the_whole() -> None:
    part = Part("w", (7, 4), dim=0, start=4, size=3, counts=False)
    values = torch.nn.Parameter(torch.zeros(5))
    (share,) = shares_of([Piece(part, 2, 7, values)])
    assert (share.name, share.shape, share.offsets, share.local_shape) == ("w", (7, 4), (4, 0), (3, 4))
    assert (share.start, share.stop, share.counts) == (2, 7, False)
    assert share.tensor is values


def test_layouts_of_the_same_degrees_in_another_order_have_other_words() -> None:
    plain, turned = Layout(pp=2, tp=2), Layout(pp=2, tp=2, order=("tp", "pp", "replicate", "shard", "cp"))
    assert _layout_words(plain) == plain.describe()
    assert _layout_words(turned) != _layout_words(plain)
