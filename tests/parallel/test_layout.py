from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.parallel.layout import AXES, Layout


def resolve(ranks: int, tasks_per_node: int = 4, **parallel: Any) -> Layout:
    config = {"parallel": parallel, "train": {"global_batch": 64}, "cluster": {"tasks_per_node": tasks_per_node}}
    return Layout.resolve(OmegaConf.create(config), ranks)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 4)) for axis in AXES}
    return Layout(**degrees, zero=1, order=tuple(draw(st.permutations(AXES))))


def test_data_parallel_fills_the_ranks() -> None:
    layout = resolve(4)
    assert (layout.dp, layout.replicate, layout.shard, layout.describe()) == (4, 4, 1, "dp=4")
    assert [layout.dp_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "parallel", "words"),
    [
        (4, {"zero": 2}, "dp=4 zero=2"),
        (8, {"zero": 3, "replicate": 2}, "dp=8 (2x4) zero=3"),
        (8, {"tp": 2, "sequence_parallel": True, "pp": 2, "zero": 1}, "pp=2 (1f1b) dp=2 zero=1 tp=2+sp"),
        (8, {"pp": 4, "schedule": "interleaved"}, "pp=4 (interleaved, 2 chunks) dp=2"),
        (2, {"sequence_parallel": True, "schedule": "zbv"}, "dp=2"),
    ],
)
def test_what_is_asked_is_described(ranks: int, parallel: dict[str, Any], words: str) -> None:
    layout = resolve(ranks, **parallel)
    assert layout.describe() == words
    assert layout.world_size == ranks


def test_stages_are_those_of_all_ranks() -> None:
    assert resolve(4, pp=4, schedule="zbv").stages == 8
    assert resolve(4, schedule="zbv").stages == 1


@pytest.mark.parametrize(
    ("ranks", "tasks", "parallel", "expected"),
    [
        (8, 4, {}, (2, 4)),
        (12, 4, {}, (3, 4)),
        (4, 4, {}, (1, 4)),
        (8, 4, {"tp": 2}, (2, 2)),
        (8, 4, {"pp": 2}, (1, 4)),
        (8, 4, {"pp": 4}, (1, 2)),
        (8, 2, {"tp": 4}, (2, 1)),
    ],
)
def test_shards_can_stay_inside_nodes_of_any_number(
    ranks: int, tasks: int, parallel: dict[str, Any], expected: tuple[int, int]
) -> None:
    layout = resolve(ranks, tasks, zero=3, replicate="nodes", **parallel)
    assert (layout.replicate, layout.shard) == expected
    assert layout.is_inside_nodes("shard", tasks)


def test_a_layout_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(UserError, match="multiply to 3"):
        resolve(4, dp=3)


def test_tensor_parallel_ranks_are_neighbours_and_stages_far_apart() -> None:
    layout = resolve(8, pp=2, tp=2)
    assert [list(layout.ranks_along(0, axis)) for axis in ("tp", "replicate", "pp")] == [[0, 1], [0, 2], [0, 4]]


def test_the_order_of_the_axes_can_be_overridden() -> None:
    layout = resolve(8, pp=2, tp=2, order=["tp", "shard", "replicate", "cp", "pp"])
    assert [list(layout.ranks_along(5, axis)) for axis in ("tp", "replicate", "pp")] == [[1, 5], [5, 7], [4, 5]]


@given(layouts())
def test_positions_on_the_axes_tell_all_ranks_apart(layout: Layout) -> None:
    places = [tuple(layout.index(rank, axis) for axis in AXES) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert all(index < layout.degree(axis) for place in places for axis, index in zip(AXES, place, strict=True))


@given(layouts())
def test_every_share_of_a_batch_goes_to_equally_many_ranks_and_is_counted_once(layout: Layout) -> None:
    others = layout.pp * layout.cp * layout.tp
    ranks = range(layout.world_size)
    assert Counter(map(layout.dp_rank, ranks)) == dict.fromkeys(range(layout.dp), others)
    assert sorted(layout.dp_rank(rank) for rank in ranks if layout.counts_data(rank)) == list(range(layout.dp))


@given(layouts(), st.sampled_from(AXES))
def test_the_groups_of_an_axis_part_the_ranks_and_differ_only_there(layout: Layout, axis: str) -> None:
    groups = {tuple(layout.ranks_along(rank, axis)) for rank in range(layout.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert [layout.index(rank, axis) for rank in group] == list(range(layout.degree(axis)))
        for other in AXES:
            assert other == axis or len({layout.index(rank, other) for rank in group}) == 1


@given(layouts(), st.sampled_from(AXES), st.data())
def test_an_axis_is_inside_nodes_when_no_group_has_ranks_on_two(layout: Layout, axis: str, data: st.DataObject) -> None:
    fitting = [count for count in range(1, layout.world_size + 1) if layout.world_size % count == 0]
    tasks = data.draw(st.sampled_from(fitting))
    groups = [layout.ranks_along(rank, axis) for rank in range(layout.world_size)]
    assert layout.is_inside_nodes(axis, tasks) == all(
        len({member // tasks for member in group}) == 1 for group in groups
    )
