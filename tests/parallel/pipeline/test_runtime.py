from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dthpc.parallel.pipeline.schedule import build
from dthpc.parallel.pipeline.verify import peak_activations
from dthpc.parallel.pipeline.wires import SHORT
from tests.parallel.pipeline import tasks
from tests.parallel.pipeline.tasks import Case, Outcome
from tests.ranks import RankFailed, pool

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 1), ("zb_h1", 1), ("zbv", 2)]


def run(case: Case, ranks: int) -> tuple[Outcome, list[Outcome]]:
    """The step without a pipeline, and on ranks."""
    (alone,) = pool().run(1, tasks.plain, case)
    return alone, pool().run(ranks, tasks.piped, case, ranks)


def assert_equal(alone: Outcome, ranks: list[Outcome], ulps: float = 0) -> None:
    """The same loss and gradients; those of a weight on two ranks are added, which may round differently."""
    assert sum(outcome.counted for outcome in ranks) == alone.counted
    assert sum(outcome.loss for outcome in ranks) == pytest.approx(alone.loss, rel=1e-12 if not ulps else 1e-6)
    found: dict[str, Tensor] = {}
    for outcome in ranks:
        for name, gradient in outcome.gradients.items():
            found[name] = found[name] + gradient if name in found else gradient
    assert found.keys() == alone.gradients.keys()
    for name, expected in alone.gradients.items():
        scale = expected.abs().max().item() * 2.0**-23 * ulps
        torch.testing.assert_close(found[name], expected, rtol=0, atol=scale, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("short", [0, SHORT])
def test_every_schedule_gives_the_gradients_of_one_process_bit_for_bit(
    schedule: str, chunks: int, ranks: int, short: int
) -> None:
    alone, outcomes = run(Case(schedule, chunks, rows=(2,) * 8, short=short), ranks)
    assert_equal(alone, outcomes)
    actions = build(schedule, ranks, chunks, 8).actions
    if schedule not in ("zb_h1", "zbv"):
        assert [outcome.peak_held for outcome in outcomes] == [peak_activations(mine) for mine in actions]


def test_peak_memory_of_1f1b_is_that_of_its_theory() -> None:
    micro_batches, ranks = 6, 3
    (one,) = [pool().run(ranks, tasks.piped, Case("gpipe", rows=(2,)), ranks)]
    for schedule, held in (("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])):
        outcomes = pool().run(ranks, tasks.piped, Case(schedule, rows=(2,) * micro_batches), ranks)
        assert [outcome.peak_held for outcome in outcomes] == held
        assert [outcome.peak_bytes for outcome in outcomes] == [
            count * alone.peak_bytes for count, alone in zip(held, one, strict=True)
        ]


def test_one_process_runs_the_same_runtime() -> None:
    alone, outcomes = run(Case("gpipe", rows=(3, 2, 0, 2)), 1)
    assert_equal(alone, outcomes)
    assert outcomes[0].peak_held == 1


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize("run_empty", [False, True])
def test_micro_batches_may_be_uneven_and_empty(schedule: str, chunks: int, run_empty: bool) -> None:
    case = Case(schedule, chunks, rows=(0, 3, 1, 0), run_empty=run_empty, steps=2)
    assert_equal(*run(case, 2))


@pytest.mark.parametrize("run_empty", [False, True])
def test_a_step_may_have_no_samples_at_all(run_empty: bool) -> None:
    outcomes = pool().run(2, tasks.piped, Case("1f1b", rows=(0, 0), run_empty=run_empty), 2)
    assert [outcome.counted for outcome in outcomes] == [0, 0]
    gradients = [gradient for outcome in outcomes for gradient in outcome.gradients.values()]
    assert bool(gradients) == run_empty


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("zbv", 2)])
def test_a_tied_weight_gets_the_sum_of_both_stages(schedule: str, chunks: int) -> None:
    alone, outcomes = run(Case(schedule, chunks, tied=True), 2)
    holders = [outcome for outcome in outcomes if "embed.weight" in outcome.gradients]
    # In a V both ends are on the first rank, where the weight is one.
    assert len(holders) == (1 if schedule == "zbv" else 2)
    assert_equal(alone, outcomes, ulps=4)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_micro_batch_drops_the_same_in_every_pass(schedule: str, chunks: int, recompute: bool) -> None:
    case = Case(schedule, chunks, rows=(2, 1, 2, 3), dropout=0.4, recompute=recompute)
    alone, outcomes = run(case, 2)
    assert_equal(alone, outcomes)
    (undropped,) = pool().run(1, tasks.plain, Case(rows=case.rows))
    assert alone.loss != undropped.loss


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("zbv", 2)])
def test_autocast_is_that_of_one_process(schedule: str, chunks: int) -> None:
    assert_equal(*run(Case(schedule, chunks, bf16=True), 2))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_forward_passes_alone_are_an_evaluation(schedule: str, chunks: int) -> None:
    case = Case(schedule, chunks, rows=(2, 2, 3, 0), forward_only=True)
    alone, outcomes = run(case, 2)
    assert sum(outcome.loss for outcome in outcomes) == pytest.approx(alone.loss, rel=1e-12)
    assert sum(outcome.counted for outcome in outcomes) == alone.counted
    assert not any(outcome.gradients or outcome.peak_held for outcome in outcomes)


@pytest.mark.parametrize(("short", "words"), [(0, "gloo"), (SHORT, "of the pipeline is gone")])
@pytest.mark.parametrize("at", [0, 2])
def test_when_one_stage_breaks_all_ranks_end(at: int, short: int, words: str) -> None:
    with pytest.raises(RankFailed) as failure:
        pool().run(3, tasks.piped, Case("1f1b", breaks=at, short=short), 3)
    first, second, third = failure.value.errors
    assert "this stage broke" in str(third)
    for neighbour in (first, second):
        assert words in str(neighbour)
