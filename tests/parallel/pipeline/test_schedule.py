from __future__ import annotations

import tracemalloc

import pytest

from dthpc.errors import UserError
from dthpc.parallel.pipeline.names import SCHEDULES, chunks_of
from dthpc.parallel.pipeline.schedule import Action, Kind, Placement, Schedule, actions_of, build


def listed(name: str, rank: int, ranks: int, micro_batches: int, chunks: int | None = None) -> str:
    return " ".join(map(str, actions_of(name, rank, ranks, chunks_of(name, chunks), micro_batches)))


def made(name: str, ranks: int, micro_batches: int) -> Schedule:
    return build(name, ranks, chunks_of(name, None), micro_batches)


def test_an_action_has_a_short_text_that_can_be_read_back() -> None:
    assert str(Action(Kind.F, 3, 0)) == "3F0"
    assert Action.parse("12W345") == Action(Kind.W, 12, 345)
    with pytest.raises(ValueError, match="3X0"):
        Action.parse("3X0")


def test_gpipe_does_all_forward_passes_first_and_one_micro_batch_is_layer_wise_parallelism() -> None:
    assert listed("gpipe", 1, 2, 3) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert [listed("gpipe", rank, 3, 1) for rank in range(3)] == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_1f1b_as_in_figure_4_of_narayanan_et_al() -> None:
    assert listed("1f1b", 0, 4, 8) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    assert listed("1f1b", 2, 4, 4) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3"
    assert listed("1f1b", 3, 4, 4) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"


def test_1f1b_with_fewer_micro_batches_than_ranks() -> None:
    assert listed("1f1b", 0, 4, 2) == "0F0 0F1 0B0 0B1"


def test_interleaved_rotates_through_the_chunks() -> None:
    assert listed("interleaved", 1, 2, 2) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert listed("interleaved", 0, 2, 4).startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0")


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert listed("interleaved", 1, 4, 8, chunks=1) == listed("1f1b", 1, 4, 8)


def test_zb_h1_leaves_as_many_weight_gradients_waiting_as_there_are_ranks_before() -> None:
    assert listed("zb_h1", 0, 3, 3) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert listed("zb_h1", 2, 3, 4) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_zbv_is_laid_out_as_a_v() -> None:
    schedule = made("zbv", 4, 8)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert listed("zbv", 3, 4, 8).startswith("3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0")


@pytest.mark.parametrize("v_shaped", [False, True])
def test_stages_and_ranks_are_each_others_inverse(v_shaped: bool) -> None:
    placement = Placement(5, 3, v_shaped)
    held = [stage for rank in range(5) for stage in placement.stages_of(rank)]
    assert sorted(held) == list(range(15))
    assert all(placement.rank_of(stage) == rank for rank in range(5) for stage in placement.stages_of(rank))


def test_stages_are_dealt_round_robin_by_the_other_schedules() -> None:
    schedule = build("interleaved", 4, 3, 4)
    assert schedule.stages_of(1) == (1, 5, 9)
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("name", SCHEDULES)
def test_on_one_rank_every_schedule_goes_micro_batch_by_micro_batch(name: str) -> None:
    assert listed(name, 0, 1, 3, chunks=1) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert listed(name, 0, 1, 2, chunks=2) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_pipedream_has_the_order_of_1f1b() -> None:
    assert list(made("pipedream", 4, 8).actions) == list(made("1f1b", 4, 8).actions)


@pytest.mark.parametrize("micro_batches", [1, 3, 12])
def test_the_weight_version_is_the_number_of_updates_made_before_the_forward_pass(micro_batches: int) -> None:
    schedule = made("pipedream", 4, micro_batches)
    for rank in range(4):
        updates = 0
        for kind, stage, micro_batch in schedule.actions[rank]:
            if kind is Kind.F:
                assert schedule.weight_version(stage, micro_batch) == updates
            updates += kind is Kind.B


def test_staleness_of_a_stage_of_pipedream_is_its_distance_to_the_end() -> None:
    schedule = made("pipedream", 4, 12)
    assert [11 - schedule.weight_version(stage, 11) for stage in range(4)] == [3, 2, 1, 0]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "pipedream"])
def test_all_other_schedules_use_the_weights_that_the_step_began_with(name: str) -> None:
    schedule = made(name, 4, 8)
    assert not schedule.stale
    assert {schedule.weight_version(stage, 7) for stage in range(schedule.stages)} == {0}


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches", "message"),
    [
        ("1f2b", 4, 1, 8, "parallel.schedule=1f2b"),
        ("interleaved", 4, 2, 6, "4 or 8 micro-batches"),
        ("interleaved", 4, 2, 3, "Instead: 4 micro-batches"),
        ("1f1b", 4, 2, 8, "parallel.chunks=2"),
        ("zbv", 4, 1, 8, "parallel.chunks=1"),
        ("gpipe", 4, 1, 0, "0 micro-batches"),
    ],
)
def test_sizes_that_a_schedule_cannot_have(
    name: str, ranks: int, chunks: int, micro_batches: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(name, ranks, chunks, micro_batches)
    with pytest.raises(UserError, match=message):
        actions_of(name, 0, ranks, chunks, micro_batches)


def test_the_ranks_of_a_schedule_are_a_sequence() -> None:
    schedule = made("1f1b", 3, 2)
    assert len(schedule.actions) == 3
    assert schedule.actions[-1] == schedule.actions[2]
    assert list(schedule.actions[1:]) == [schedule.actions[1], schedule.actions[2]]
    with pytest.raises(IndexError):
        schedule.actions[3]


def test_one_rank_among_thousands_is_built_without_the_others() -> None:
    # All ranks of the largest schedule here have 2·10⁸ actions, which no login node holds; one of them has 5·10⁴.
    tracemalloc.start()
    try:
        for name in SCHEDULES:
            schedule = made(name, 4096, 8192)
            assert all(len(schedule.actions[rank]) >= 2 * 8192 for rank in (0, 2047, 4095))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
