from __future__ import annotations

from datetime import timedelta

import pytest

from dthpc.parallel.layout import AXES, Layout
from dthpc.parallel.mesh import make_mesh
from tests.parallel import mesh_tasks as tasks
from tests.ranks import RankFailed, pool

CUBE = Layout(pp=2, shard=2, tp=2, zero=1)


@pytest.mark.parametrize(
    "layout",
    [
        CUBE,
        Layout(pp=2, shard=2, tp=2, zero=1, order=("tp", "shard", "replicate", "cp", "pp")),
        Layout(replicate=2, shard=3, zero=3),
        Layout(replicate=2, shard=2, zero=2, order=("shard", "pp", "tp", "replicate", "cp")),
        Layout(replicate=2),
    ],
    ids=lambda layout: f"{layout.describe()} {'-'.join(layout.order)}",
)
def test_each_axis_joins_the_ranks_that_differ_only_there_in_its_order(layout: Layout) -> None:
    for rank, seen in enumerate(pool().run(layout.world_size, tasks.groups, layout)):
        for axis in AXES:
            if layout.degree(axis) == 1:
                assert seen[axis] is None
            else:
                assert seen[axis] == (list(layout.ranks_along(rank, axis)), layout.index(rank, axis))


def test_torch_sees_the_same_mesh() -> None:
    for rank, (names, shape, place, inner) in enumerate(pool().run(8, tasks.torch_mesh, CUBE)):
        assert (names, shape) == (("pp", "shard", "tp"), [2, 2, 2])
        assert place == [CUBE.index(rank, axis) for axis in names]
        assert inner == list(CUBE.ranks_along(rank, "tp"))


def test_a_mesh_of_one_axis_has_its_name() -> None:
    seen = pool().run(3, tasks.torch_mesh, Layout(shard=3, zero=1))
    assert seen == [(("shard",), [3], [rank], [0, 1, 2]) for rank in range(3)]


def test_an_axis_of_all_ranks_needs_no_group_of_its_own() -> None:
    assert pool().run(2, tasks.whole_world, Layout(shard=2, zero=1)) == [True, True]


def test_groups_have_the_timeout_of_all_ranks_group_or_the_one_asked_for() -> None:
    layout = Layout(shard=2, tp=2, zero=1)
    assert pool().run(4, tasks.timeouts, layout, None) == [[60, 60]] * 4
    assert pool().run(4, tasks.timeouts, layout, timedelta(seconds=7)) == [[7, 7]] * 4


def test_two_meshes_live_side_by_side() -> None:
    assert pool().run(4, tasks.twice, Layout(shard=2, tp=2, zero=1)) == [[1, 1], [1, 1], [5, 5], [5, 5]]


def test_an_island_is_the_mesh_of_one_replica() -> None:
    layout = Layout(pp=2, replicate=2, shard=2, zero=1)
    for rank, (everyone, places, groups) in enumerate(pool().run(8, tasks.island, layout)):
        replica = layout.index(rank, "replicate")
        assert everyone == [other for other in range(8) if layout.index(other, "replicate") == replica]
        assert places == {"pp": (2, layout.index(rank, "pp")), "shard": (2, layout.index(rank, "shard"))}
        assert groups == {axis: list(layout.ranks_along(rank, axis)) for axis in ("pp", "shard")}


def test_an_island_of_one_rank_has_no_group_and_one_of_all_ranks_is_the_mesh() -> None:
    assert pool().run(2, tasks.island, Layout(replicate=2)) == [(None, {}, {})] * 2
    alone = pool().run(2, tasks.island, Layout(shard=2, zero=1))
    assert alone == [([0, 1], {"shard": (2, rank)}, {"shard": [0, 1]}) for rank in range(2)]


def test_a_single_process_needs_no_group() -> None:
    mesh = make_mesh(Layout(), "cpu")
    assert (mesh.device_mesh, mesh.world(), mesh.group("tp"), mesh.index("pp"), mesh.rank) == (None, None, None, 0, 0)


def test_a_layout_of_another_number_of_ranks_is_an_error() -> None:
    with pytest.raises(RankFailed, match="a layout of 4 ranks"):
        pool().run(2, tasks.wrong_size, Layout(shard=4, zero=1))


def test_ranks_of_an_axis_share_memory_where_they_share_a_host() -> None:
    layout = Layout(pp=2, replicate=2, shard=2, zero=1)
    found = pool().run(8, tasks.memory, layout, "auto", "cpu", 0)
    assert found == [dict.fromkeys(("replicate", "shard"), (True, "2 ranks of one host share memory"))] * 8
    assert pool().run(2, tasks.memory, Layout(shard=2, zero=1), False, "cpu", 0) == [{}, {}]
    (first, *_, last) = pool().run(4, tasks.memory, Layout(replicate=2, shard=2, zero=1), "auto", "cpu", 2)
    assert first == last
    assert first["shard"][0]
    assert first["replicate"] == (False, "ranks run on 2 hosts")


def test_tensors_of_a_gpu_do_not_go_over_the_hosts_memory() -> None:
    assert (
        pool().run(2, tasks.memory, Layout(tp=2), "auto", "cuda", 0) == [{"tp": (False, "tensors are on the cuda")}] * 2
    )


def test_memory_that_must_be_shared_and_cannot_is_an_error_on_all_ranks() -> None:
    with pytest.raises(RankFailed) as failure:
        pool().run(2, tasks.memory, Layout(tp=2), True, "cpu", 1)
    for error in failure.value.errors:
        why = "the ranks along tp cannot share memory: ranks run on 2 hosts"
        assert str(error).startswith(f"UserError: comm.shared_memory=true: {why}. Instead: ")
