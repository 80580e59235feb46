"""Every layout resumes every other, bitwise: the same values lie in other pieces on other ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dthpc.checkpoint.manifest import list_checkpoints, read_manifest
from tests.checkpoint.layouts import BUFFERS, ENTRIES, LAYOUTS, PARAMETERS, restore_each, save
from tests.ranks import pool


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint written by each layout."""
    roots = {}
    for name, layout in LAYOUTS.items():
        roots[name] = tmp_path_factory.mktemp("layout")
        pool().run(layout.world_size, save, roots[name], layout)
    return roots


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_resumes_all_others(saved: dict[str, Path], name: str) -> None:
    layout = LAYOUTS[name]
    for found in pool().run(layout.world_size, restore_each, saved, layout):
        assert found == {each: [] for each in saved}


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_and_shapes_are_the_same_whatever_the_layout(saved: dict[str, Path], name: str) -> None:
    manifest = read_manifest(list_checkpoints(saved[name])[0].path)
    shapes = {key: record.shape for key, record in manifest.tensors.items()}
    expected: dict[str, tuple[int, ...]] = {f"model.{name}": (3,) for name in BUFFERS}
    for parameter, shape, _ in PARAMETERS:
        expected[f"model.{parameter}"] = shape
        expected |= {f"optim.{parameter}.{entry}": shape for entry in ENTRIES}
        expected[f"optim.{parameter}.step"] = ()
    assert shapes == expected


def test_the_matrix_is_of_uneven_cuts() -> None:
    assert any(math.prod(shape) % 4 for _, shape, _ in PARAMETERS)
    assert any(dim is not None and shape[dim] % 2 for _, shape, dim in PARAMETERS)
