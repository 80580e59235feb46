"""The sampler: permutations, independence of layout, uniformity, and an order that is frozen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dthpc.data.sampler import sample_index, sample_indices, shard_for_evaluation, share, step_slice

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 97, 128, 255, 256, 257, 1000, 4096, 4099, 65537]


@pytest.mark.parametrize("n", SIZES)
def test_every_epoch_is_a_permutation(n: int) -> None:
    for seed, epoch in itertools.product((0, 1, -3, 2**63), (0, 1, 1000)):
        items = sample_indices(seed, n, np.arange(epoch * n, (epoch + 1) * n))
        assert np.array_equal(np.sort(items), np.arange(n))


@pytest.mark.parametrize(
    ("seed", "n", "numbers", "items"),
    [
        (0, 10, range(20), [3, 9, 8, 6, 2, 1, 4, 0, 7, 5, 4, 7, 0, 1, 8, 2, 9, 6, 5, 3]),
        (
            1234,
            1000003,
            [0, 1, 2, 1000002, 1000003, 10**15],
            [94344, 892315, 643569, 658808, 142589, 699777],
        ),
        (-1, 2**40, [0, 7, 2**40], [4405178977, 555702116986, 818868981184]),
    ],
)
def test_order_is_frozen(seed: int, n: int, numbers: range | list[int], items: list[int]) -> None:
    # A run that resumes under a later release must go on with the same order: these values never change.
    assert sample_indices(seed, n, list(numbers)).tolist() == items


def test_one_value_needs_no_others() -> None:
    items = sample_indices(7, 1000, np.arange(2500))
    assert [sample_index(7, 1000, g) for g in range(0, 2500, 50)] == items[::50].tolist()
    assert np.array_equal(sample_indices(7, 1000, np.arange(2500).reshape(50, 50)), items.reshape(50, 50))
    assert sample_indices(7, 1000, []).shape == (0,)


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(sample_indices(seed, 100, np.arange(epoch * 100, epoch * 100 + 100)))
        for seed in range(20)
        for epoch in range(20)
    ]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("n", [2, 3, 5, 16, 33, 100])
def test_every_item_comes_at_every_position_equally_often(n: int) -> None:
    epochs = 100 * n
    items = sample_indices(5, n, np.arange(epochs * n)).reshape(epochs, n)
    counts = np.stack([np.bincount(items[:, position], minlength=n) for position in range(n)])
    # Rows and columns both sum to `epochs`, hence (n - 1)^2 degrees of freedom; beyond five sigma is a fault.
    freedom = (n - 1) ** 2
    statistic = float(((counts - epochs / n) ** 2 / (epochs / n)).sum()) * (n - 1) / n
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_are_not_kept_together() -> None:
    items = sample_indices(11, 10_000, np.arange(10_000))
    # In a random order of 10^4 items about two neighbours differ by one.
    assert int((np.abs(np.diff(items)) == 1).sum()) < 12
    assert abs(float(np.corrcoef(items, np.arange(10_000))[0, 1])) < 0.05


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="cannot be sampled"):
        sample_index(0, n, 0)


def test_negative_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        sample_index(0, 10, -1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [None, 1, 10, 23, 24])
def test_steps_cover_every_sample_once_for_any_number_of_ranks(size: int, total: int | None) -> None:
    steps = 6
    seen = [g for step in range(steps) for rank in range(size) for g in step_slice(step, 5, rank, size, total)]
    assert seen == list(range(min(steps * 5, total if total is not None else steps * 5)))


def test_shares_differ_by_one_at_most() -> None:
    for count, size in itertools.product(range(20), range(1, 8)):
        lengths = [len(share(3, 3 + count, rank, size)) for rank in range(size)]
        assert sum(lengths) == count
        assert max(lengths) - min(lengths) <= 1


def test_foreign_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of 2"):
        share(0, 10, 2, 2)


@pytest.mark.parametrize("samples", [None, 1, 4, 10, 99])
def test_evaluation_uses_each_chosen_item_once_and_spreads_them(samples: int | None) -> None:
    for size in (1, 2, 3, 12):
        items = [item for rank in range(size) for item in shard_for_evaluation(10, rank, size, samples)]
        assert len(items) == len(set(items)) == min(10, samples or 10)
        assert items == shard_for_evaluation(10, 0, 1, samples)
    assert shard_for_evaluation(10, 0, 1, 2) == [0, 5]
