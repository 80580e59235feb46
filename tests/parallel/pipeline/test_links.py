from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.runtime import execute
from dthpc.parallel.pipeline.schedule import build
from dthpc.parallel.pipeline.wires import SHORT
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker
from tests.parallel.pipeline import tasks
from tests.parallel.pipeline.tasks import Case
from tests.parallel.pipeline.test_runtime import assert_equal, run
from tests.ranks import pool


# Of these micro-batches 240 bytes are between the shortest message and the longest.
@pytest.mark.parametrize("short", [0, 240, SHORT])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_inputs_of_several_lengths_each_tell_their_form(schedule: str, chunks: int, short: int) -> None:
    assert_equal(*run(Case(schedule, chunks, rows=(2, 0, 1, 2, 3, 1), lengths=(4, 6, 5), steps=2, short=short), 2))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2)])
def test_memory_of_messages_is_held_no_longer_than_needed(schedule: str, chunks: int) -> None:
    few, many = (
        pool().run(2, tasks.piped, Case(schedule, chunks, rows=(1,) * count, steps=2, short=0), 2) for count in (12, 24)
    )
    for short, long in zip(few, many, strict=True):
        assert 0 < long.peak_unsettled == short.peak_unsettled <= 6


def test_stages_of_one_process_hand_over_without_a_group() -> None:
    schedule = build("interleaved", 1, 2, 3)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    batches = [MicroBatch(torch.randn(2, 3), None, 2) for _ in range(3)]
    sum(second(first(batch.inputs)).square().sum() for batch in batches).backward()
    expected = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    for layer in (first, second):
        layer.zero_grad()
    worker = ModuleWorker({0: first, 1: second}, 2, lambda y, t: (y.square().sum(), 1))
    worker.begin(batches, schedule.actions[0])
    execute(schedule.actions[0], worker, Links(schedule, None, torch.device("cpu")))
    found = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    torch.testing.assert_close(found, expected)


def test_the_first_dimension_may_be_a_multiple_of_the_rows() -> None:
    assert pool().run(2, tasks.handed_over, "flat")[1] == "[(10, 4), (15, 4)]"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tuple", "stage 0 gave a tuple; between pipeline stages goes one floating-point tensor"),
        ("integers", "stage 0 gave a torch.int64 tensor of 3 dimensions"),
        ("rows", "stage 0 gave 3 rows for a micro-batch of 2"),
        ("later", "stage 0 gave torch.float32 [1, 5, 2] for each row, and torch.float32 [1, 5, 4] before"),
    ],
)
def test_what_cannot_travel_is_refused(how: str, words: str) -> None:
    first, second = pool().run(2, tasks.handed_over, how)
    assert words in first
    assert "model._target_" in first
    assert second == "gone"
