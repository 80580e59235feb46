"""Which sample comes when, as pure functions of a seed and a count.

Global sample `g` (0, 1, 2, … over all ranks, steps, epochs and attempts) is dataset item `sample_index(seed, n, g)`.
Every epoch of `n` samples is a permutation; nothing depends on the number of ranks or on the batch size, so the state
of the whole is one integer: the number of samples consumed so far.

The permutation is a Feistel network over the smallest even number of bits that holds `n`, walked along its cycles until
the value falls below `n` (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): it needs no memory and any
of its values is found without the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
SMALLEST_HALF = 3
"""Bits of half the domain, at least: smaller networks reach too few of the permutations."""

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Words = npt.NDArray[np.uint64]


def sample_index(seed: int, n: int, g: int) -> int:
    """Dataset item of global sample `g`; see `sample_indices`."""
    return int(sample_indices(seed, n, np.array([g]))[0])


def sample_indices(seed: int, n: int, g: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Dataset items of global samples.

    Args:
        seed: any integer; its lowest 64 bits count.
        n: number of samples of the dataset, at least 1 and below 2^62.
        g: global sample numbers, not negative, of any shape.

    Returns:
        Items in [0, n), int64, in the shape of `g`. For each epoch e the items of `g` in [e n, (e+1) n) are a
        permutation.

    Raises:
        ValueError: `n` or a sample number is out of range.
    """
    numbers = np.asarray(g, dtype=np.int64)
    if not 1 <= n < 1 << 62:
        raise ValueError(f"a dataset of {n} samples cannot be sampled")
    if numbers.size and numbers.min() < 0:
        raise ValueError("global sample numbers are not negative")
    flat = numbers.ravel()
    # Mixing the seed alone first keeps (seed, epoch) pairs such as (0, 1) and (1, 0) apart.
    keys = _mix(_mix(np.array([seed & _WORD], dtype=np.uint64)) + _words(flat // n))
    values = _words(flat % n)
    half = max(SMALLEST_HALF, ((n - 1).bit_length() + 1) // 2)
    values = _feistel(values, keys, half)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], half)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(numbers.shape)


def share(start: int, stop: int, rank: int, size: int) -> range:
    """A rank's contiguous share of [start, stop): the shares cover it, none overlap, sizes differ by one at most.

    Raises:
        ValueError: the rank is not in [0, size).
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of {size}")
    each, extra = divmod(max(0, stop - start), size)
    first = start + rank * each + min(rank, extra)
    return range(first, first + each + (rank < extra))


def step_slice(step: int, global_batch: int, dp_rank: int, dp_size: int, total: int | None = None) -> range:
    """Global samples of one rank in one step.

    Args:
        step: step number, from 0.
        global_batch: samples of a step over all ranks.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        total: samples after which training ends; the last step is cut there and what is left of it is shared evenly, so
            that a rank may get none.
    """
    start = step * global_batch
    stop = start + global_batch
    return share(start, stop if total is None else min(stop, total), dp_rank, dp_size)


def shard_for_evaluation(n: int, rank: int, size: int, samples: int | None = None) -> list[int]:
    """Items that one rank evaluates; over all ranks each chosen item occurs exactly once.

    Args:
        n: number of samples of the dataset.
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        samples: how many to evaluate, spread evenly over the dataset; `None` for all.
    """
    chosen = n if samples is None else min(samples, n)
    return [k * n // chosen for k in share(0, chosen, rank, size)]


def _feistel(values: Words, keys: Words, half: int) -> Words:
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = values >> shift, values & mask
    for number in range(1, ROUNDS + 1):
        salt = np.uint64((number * _GOLDEN) & _WORD)
        left, right = right, left ^ (_mix(right + (keys ^ salt)) & mask)
    joined: Words = (left << shift) | right
    return joined


def _mix(words: Words) -> Words:
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _words(numbers: npt.NDArray[np.integer]) -> Words:
    return numbers.astype(np.uint64)
