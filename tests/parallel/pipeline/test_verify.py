from __future__ import annotations

from dataclasses import replace

import pytest

from dthpc.parallel.pipeline.names import chunks_of
from dthpc.parallel.pipeline.schedule import Action, Schedule, build
from dthpc.parallel.pipeline.verify import verify

ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zbv", 2), ("pipedream", 1)]


def by_hand(*ranks: str, chunks: int = 1, micro_batches: int = 2, name: str = "1f1b") -> Schedule:
    actions = [tuple(Action.parse(word) for word in text.split()) for text in ranks]
    return Schedule(name, len(ranks), chunks, micro_batches, actions)


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_every_schedule_of_every_size_is_without_fault(name: str, chunks: int) -> None:
    for ranks in range(1, 9):
        for micro_batches in range(1, 2 * ranks + 3):
            if name != "interleaved" or micro_batches % ranks == 0:
                passes = {"zb_h1": 3, "zbv": 3}.get(name, 2) if ranks > 1 else 2
                verdict = verify(build(name, ranks, chunks, micro_batches))
                assert verdict.actions == passes * ranks * chunks * micro_batches


def peaks(name: str, ranks: int, micro_batches: int) -> list[int]:
    return list(verify(build(name, ranks, chunks_of(name, None), micro_batches)).peak_activations)


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_there_are_ranks_to_come() -> None:
    assert peaks("gpipe", 4, 16) == [16] * 4
    assert peaks("1f1b", 4, 16) == [4, 3, 2, 1]
    assert peaks("1f1b", 4, 2) == [2, 2, 2, 1]
    assert peaks("pipedream", 4, 16) == [4, 3, 2, 1]


def test_interleaved_holds_its_warm_up_and_one() -> None:
    assert peaks("interleaved", 4, 16) == [4 + 2 * (3 - rank) + 1 for rank in range(4)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_schedules_hold_no_more_than_the_first_rank_of_1f1b(ranks: int) -> None:
    assert max(peaks("zb_h1", ranks, 4 * ranks)) == ranks
    # A chunk of zbv is half of a rank's layers.
    assert max(peaks("zbv", ranks, 4 * ranks)) == 2 * ranks


def test_activations_are_held_until_the_weight_gradient() -> None:
    verdict = verify(by_hand("0F0 0F1 0I0 0I1 0W0 0W1", micro_batches=2))
    assert verdict.peak_activations == (2,)
    verdict = verify(by_hand("0F0 0I0 0F1 0I1 0W0 0W1", micro_batches=2))
    assert verdict.peak_activations == (2,)
    verdict = verify(by_hand("0F0 0B0 0F1 0B1", micro_batches=2))
    assert verdict.peak_activations == (1,)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_good_schedule_by_hand() -> None:
    assert verify(by_hand(*GOOD)).peak_activations == (2, 1)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0F1 0B0", GOOD[1], "rank 0: 0B1 is missing"),
        ("0F0 0B0", GOOD[1], "rank 0: 0F1 is missing"),
        (GOOD[0], "1F0 1B0 1F1 1I1", "rank 1: 1W1 is missing"),
        (GOOD[0], "1F0 1B0 1F1 1F1 1B1", "rank 1: 1F1 occurs twice"),
        (GOOD[0], "1F0 1B0 1B1 1F1", "rank 1: 1B1 comes after nothing"),
        (GOOD[0], "1F0 1W0 1I0 1F1 1B1", "rank 1: 1W0 comes after F "),
        (GOOD[0], "1F0 1I0 1B0 1F1 1B1", "rank 1: 1B0 comes after F I "),
        (GOOD[0], "1F0 1B0 1W0 1F1 1B1", "rank 1: 1W0 comes after F B "),
        (GOOD[0], "1F0 1B0 0F1 1B1", "rank 1: 0F1 is of a stage that the rank does not hold"),
        (GOOD[0], "1F0 1B0 1F1 1B1 1F2 1B2", "rank 1: 1F2 is of no micro-batch"),
        ("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", "stages 0 and 1 do their forward passes in different orders"),
        ("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0", "stages 0 and 1 do their backward passes in different orders"),
        (
            "0F0 0B0 0F1 0B1",
            "1F0 1F1 1B0 1B1",
            "deadlock: rank 0 stands before 0B0 and waits for the gradient of stage 1",
        ),
    ],
)
def test_the_first_fault_is_named(first: str, second: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(by_hand(first, second))


def test_a_deadlock_names_every_rank_that_waits() -> None:
    with pytest.raises(ValueError, match=r"rank 0 stands before 0B0 .*; rank 1 stands before 1F1 .* from rank 0"):
        verify(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


def test_a_rank_that_waits_for_its_own_later_work_is_a_deadlock() -> None:
    with pytest.raises(ValueError, match="deadlock: rank 0 stands before 1F0"):
        verify(by_hand("1F0 0F0 1B0 0B0", chunks=2, micro_batches=1))


def test_a_list_of_actions_for_each_rank() -> None:
    with pytest.raises(ValueError, match="2 ranks, but lists of actions for 1"):
        verify(replace(by_hand(*GOOD), actions=[()]))


def test_the_number_of_actions_bounds_the_work() -> None:
    verdict = verify(build("zbv", 64, 2, 256))
    assert verdict.actions == 64 * 2 * 256 * 3
    assert set(verdict.peak_activations) == {128}
