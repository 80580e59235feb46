from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.parallel.pipeline.names import SCHEDULES, chunks_of
from dthpc.parallel.pipeline.schedule import Kind, build
from dthpc.parallel.pipeline.theory import Timeline, bubble, idle_time, simulate
from dthpc.parallel.pipeline.verify import verify


def timed(
    name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float], chunks: int | None = None
) -> Timeline:
    """A schedule with costs of all layers of a rank."""
    chunks = chunks_of(name, chunks)
    forward, input_backward, weight_backward = (cost / chunks for cost in costs)
    return simulate(build(name, ranks, chunks, micro_batches), forward, input_backward, weight_backward)


def test_the_figures_of_megatron() -> None:
    assert bubble("gpipe", 8, 1, 64) == bubble("1f1b", 8, 1, 64) == pytest.approx(7 / 64)
    assert round(bubble("1f1b", 8, 1, 64), 3) == 0.109
    assert round(bubble("interleaved", 8, 4, 64), 3) == 0.027


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", [(10, 10, 10), (10, 12, 8), (8, 12, 12), (1, 2, 1)])
def test_simulation_and_formula_agree_for_gpipe_1f1b_pipedream_and_interleaved(
    ranks: int, costs: tuple[float, float, float]
) -> None:
    for micro_batches in (ranks, 4 * ranks):
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("pipedream", 1), ("interleaved", 2), ("interleaved", 4)):
            timeline = timed(name, ranks, micro_batches, costs, chunks)
            assert timeline.idle == pytest.approx(idle_time(name, ranks, chunks, micro_batches, *costs))
            assert timeline.bubble == pytest.approx(bubble(name, ranks, chunks, micro_batches, *costs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", [(10, 10, 10), (10, 12, 8), (12, 10, 9), (10, 10, 5)])
def test_simulation_and_formula_agree_for_zb_h1(ranks: int, costs: tuple[float, float, float]) -> None:
    for micro_batches in (ranks, ranks + 1, 4 * ranks):
        idle = timed("zb_h1", ranks, micro_batches, costs).idle
        assert idle == pytest.approx((ranks - 1) * (costs[0] + costs[1] - costs[2]))
        assert idle == pytest.approx(idle_time("zb_h1", ranks, 1, micro_batches, *costs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", [(10, 10, 10), (10, 10, 8), (10, 10, 5)])
def test_simulation_and_formula_agree_for_zbv(ranks: int, costs: tuple[float, float, float]) -> None:
    for micro_batches in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        idle = timed("zbv", ranks, micro_batches, costs).idle
        assert idle == pytest.approx(idle_time("zbv", ranks, 2, micro_batches, *costs))


def test_no_rank_of_zbv_idles_between_its_first_pass_and_its_last() -> None:
    timeline = timed("zbv", 4, 16, (10, 10, 10))
    assert [mine[-1].end - mine[0].start for mine in timeline.spans] == list(timeline.busy)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["zb_h1", "zbv"])
def test_zero_bubble_is_faster_than_1f1b_can_be(name: str, ranks: int) -> None:
    for micro_batches in (ranks, 4 * ranks):
        theory_of_1f1b = (micro_batches + ranks - 1) * 30
        assert timed(name, ranks, micro_batches, (10, 10, 10)).makespan < theory_of_1f1b
        assert timed("1f1b", ranks, micro_batches, (10, 10, 10)).makespan == theory_of_1f1b


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_no_bubble(name: str) -> None:
    assert bubble(name, 1, 1, 4) == 0
    assert simulate(build(name, 1, 1, 4), 1, 1, 1).idle == 0


def test_times_of_a_pipeline_with_uneven_stages_and_slow_links() -> None:
    timeline = simulate(build("gpipe", 2, 1, 2), [1, 3], [2, 4], [0, 1], send=0.5)
    shown = [[(str(span.action), span.start, span.end) for span in mine] for mine in timeline.spans]
    assert shown == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 13, 15), ("0B1", 18, 20)],
        [("1F0", 1.5, 4.5), ("1F1", 4.5, 7.5), ("1B0", 7.5, 12.5), ("1B1", 12.5, 17.5)],
    ]
    assert timeline.makespan == 20
    assert timeline.busy == (6, 16)
    assert timeline.idle == 4
    assert timeline.bubble == 0.25
    assert timeline.peak_activations == (2, 2)


def test_nothing_is_sent_between_two_stages_of_one_rank() -> None:
    timeline = simulate(build("zbv", 2, 2, 1), 1, 1, 1, send=100)
    ends = {str(span.action): span.end for mine in timeline.spans for span in mine}
    starts = {str(span.action): span.start for mine in timeline.spans for span in mine}
    assert starts["2F0"] == ends["1F0"]
    assert starts["1F0"] == ends["0F0"] + 100


def test_a_simulation_does_every_action_in_its_order_and_holds_what_the_verdict_says() -> None:
    schedule = build("zb_h1", 4, 1, 6)
    timeline = simulate(schedule, 3, 2, 1, send=0.25)
    assert [tuple(span.action for span in mine) for mine in timeline.spans] == list(schedule.actions)
    assert timeline.peak_activations == verify(schedule).peak_activations
    lengths = {Kind.F: 3, Kind.I: 2, Kind.W: 1}
    assert all(span.end - span.start == lengths[span.action.kind] for mine in timeline.spans for span in mine)


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 costs for 2 stages"):
        simulate(build("gpipe", 2, 1, 2), [1, 2, 3], 1, 1)


def test_formulas_of_schedules_that_cannot_be() -> None:
    with pytest.raises(UserError, match="interleaved"):
        idle_time("interleaved", 4, 2, 6)
