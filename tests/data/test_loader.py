"""The loader: right samples in the right order on every rank, resumable, and with nothing left running."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from dthpc.data.loader import StepLoader, evaluation_batches
from dthpc.data.sampler import sample_indices
from dthpc.data.text import IGNORED
from dthpc.errors import UserError


class Numbered:
    """Item i is ([i, i], [-i - 1])."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.tensor([index, index]), torch.tensor([-index - 1])


class Wrapped(Numbered):
    """The items of `Numbered` in another form."""

    def __init__(self, form: Any) -> None:
        super().__init__(10)
        self.form = form

    def __getitem__(self, index: int) -> Any:
        return self.form(index)


def items_of(loader: StepLoader, steps: int | None = None) -> list[list[int]]:
    found = []
    with loader:
        for batch in loader:
            assert torch.equal(batch.targets[:, 0], -batch.inputs[:, 0] - 1)
            found.append(batch.inputs[:, 0].tolist())
            if steps is not None and len(found) == steps:
                break
    return found


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dthpc-loader")]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_together_follow_the_sampler_over_epochs(workers: int, ranks: int) -> None:
    by_rank = [
        items_of(StepLoader(Numbered(7), 3, 4, rank, ranks, total_samples=18, workers=workers)) for rank in range(ranks)
    ]
    order = [item for step in zip(*by_rank, strict=True) for share in step for item in share]
    assert order == sample_indices(3, 7, np.arange(18)).tolist()
    assert len(by_rank[0]) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_resumes_at_any_sample_with_any_layout(workers: int) -> None:
    whole = items_of(StepLoader(Numbered(11), 1, 4, total_samples=40, workers=workers))
    flat = [item for step in whole for item in step]
    for begin in (0, 4, 7, 39, 40):
        rest = items_of(StepLoader(Numbered(11), 1, 6, start_sample=begin, total_samples=40, workers=workers))
        assert [item for step in rest for item in step] == flat[begin:]


def test_count_of_consumed_samples_is_what_was_handed_out() -> None:
    with StepLoader(Numbered(10), 0, 4, 1, 2, start_sample=8, total_samples=18, prefetch=3) as loader:
        assert loader.consumed == 8
        assert [batch.consumed for batch in loader] == [12, 16, 18]
        assert loader.consumed == 18
        assert loader.waited_s >= 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_told_by_their_global_numbers(ranks: int) -> None:
    for rank in range(ranks):
        with StepLoader(Numbered(7), 3, 4, rank, ranks, start_sample=4, total_samples=18) as loader:
            for batch in loader:
                rows = np.arange(batch.first, batch.first + len(batch.inputs))
                assert batch.inputs[:, 0].tolist() == sample_indices(3, 7, rows).tolist()


def test_endless_without_a_total() -> None:
    assert len(items_of(StepLoader(Numbered(3), 0, 2), steps=50)) == 50
    assert loader_threads() == []


def test_rank_without_samples_gets_no_rows() -> None:
    with StepLoader(Numbered(3), 0, 4, dp_rank=3, dp_size=4, total_samples=3) as loader:
        (batch,) = loader
    assert batch.inputs.shape == (0, 2)
    assert batch.targets.shape == (0, 1)
    assert batch.inputs.dtype == torch.int64
    assert batch.consumed == 3


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_error_of_the_data_set_reaches_the_caller_and_ends_the_loader(workers: int) -> None:
    def fail(index: int) -> Any:
        raise KeyError(f"item {index}")

    loader = StepLoader(Wrapped(fail), 0, 2, workers=workers)
    with pytest.raises(KeyError, match="item"):
        next(loader)
    # Going on would pass over the step that failed.
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    assert loader_threads() == []


def test_closing_ends_the_threads_in_the_middle() -> None:
    loader = StepLoader(Numbered(100), 0, 2, workers=2)
    next(loader)
    assert loader_threads()
    loader.close()
    loader.close()
    assert loader_threads() == []


def test_no_more_is_loaded_ahead_than_asked_for() -> None:
    loaded: list[int] = []
    enough = threading.Event()

    def count(index: int) -> tuple[int, int]:
        loaded.append(index)
        if len(loaded) == 9:
            enough.set()
        return index, index

    with StepLoader(Wrapped(count), 0, 3, prefetch=2) as loader:
        next(loader)
        assert enough.wait(10)
    # One step was handed out and two were loaded ahead.
    assert len(loaded) == 9


@pytest.mark.parametrize(
    "form",
    [
        lambda i: (np.array([i, i]), np.array([-i - 1])),
        lambda i: [torch.tensor([i, i]), torch.tensor([-i - 1])],
        lambda i: (np.frombuffer(np.array([i, i]).tobytes(), dtype=np.int64), np.array([-i - 1])),
    ],
)
def test_arrays_lists_and_read_only_arrays_collate(form: Any) -> None:
    assert len(items_of(StepLoader(Wrapped(form), 0, 4), steps=3)) == 3


def test_nested_samples_collate_as_torch_does() -> None:
    dataset = Wrapped(lambda i: ({"image": torch.full((2, 3), float(i)), "name": str(i)}, i))
    with StepLoader(dataset, 0, 4) as loader:
        batch = next(loader)
    assert batch.inputs["image"].shape == (4, 2, 3)
    assert batch.inputs["name"] == [str(item) for item in batch.targets.tolist()]
    with StepLoader(dataset, 0, 4, dp_rank=1, dp_size=2, total_samples=1) as loader:
        empty = next(loader)
    assert empty.inputs["image"].shape == (0, 2, 3)
    assert empty.targets.shape == (0,)


def test_samples_of_different_length_are_padded() -> None:
    dataset = Wrapped(lambda i: (torch.full((i + 1,), i), torch.full((i + 1,), i)))
    with StepLoader(dataset, 0, 10) as loader:
        batch = next(loader)
    assert batch.inputs.shape == batch.targets.shape == (10, 10)
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        length = int(inputs[0]) + 1
        assert inputs.tolist() == [length - 1] * length + [0] * (10 - length)
        assert targets.tolist() == [length - 1] * length + [IGNORED] * (10 - length)


def test_item_that_is_no_pair_is_a_user_error() -> None:
    with pytest.raises(UserError, match="not a pair"):
        next(StepLoader(Wrapped(lambda i: torch.tensor(i)), 0, 1))


def test_empty_data_set_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no samples"):
        StepLoader(Numbered(0), 0, 1)


@pytest.mark.parametrize("samples", [None, 5])
@pytest.mark.parametrize("same_count", [False, True])
def test_evaluation_sees_every_chosen_sample_once(samples: int | None, same_count: bool) -> None:
    batches = [list(evaluation_batches(Numbered(13), 2, rank, 3, samples, same_count)) for rank in range(3)]
    items = [int(item) for rank in batches for inputs, _ in rank for item in inputs[:, 0]]
    assert sorted(items) == ([0, 2, 5, 7, 10] if samples else list(range(13)))
    counts = {len(rank) for rank in batches}
    assert len(counts) == 1 if same_count else counts == ({1} if samples else {2, 3})
