"""The bigram baseline against a direct computation and in cases with known answers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dthpc.data.bigram import END, SYMBOLS, BigramCounts, bits_per_byte


def counted(symbols: list[int], cuts: tuple[int, ...] = ()) -> BigramCounts:
    counts = BigramCounts()
    for part in np.split(np.array(symbols, dtype=np.uint16), cuts):
        counts.add(part)
    return counts


def symbols_of(*documents: bytes) -> list[int]:
    return [symbol for document in documents for symbol in (*document, END)]


def test_counts_do_not_depend_on_how_the_stream_is_cut() -> None:
    stream = symbols_of(b"banana", b"ananas")
    assert np.array_equal(counted(stream).pairs, counted(stream, (0, 1, 5, 5, 7)).pairs)


def test_agrees_with_the_formula_computed_one_pair_at_a_time() -> None:
    train, held_out = symbols_of(b"abracadabra", b"cabbage"), symbols_of(b"abbazia", b"")
    pairs = Counter(zip([END, *train], train, strict=False))
    singles = Counter(train)

    def probability(a: int, b: int) -> float:
        unigram = (singles[b] + 1) / (len(train) + SYMBOLS)
        seen = sum(count for (first, _), count in pairs.items() if first == a)
        followers = len({second for first, second in pairs if first == a})
        return (pairs[a, b] + followers * unigram) / (seen + followers) if seen else unigram

    bits = -sum(math.log2(probability(a, b)) for a, b in zip([END, *held_out], held_out, strict=False))
    expected = bits / sum(symbol != END for symbol in held_out)
    assert bits_per_byte(counted(train), counted(held_out)) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    train = counted(symbols_of(b"hello", b"world"))
    total = 0.0
    for symbol in range(SYMBOLS - 1):
        one = BigramCounts()
        one.pairs[ord("l"), symbol] = 1
        total += 2.0 ** -bits_per_byte(train, one)
    end = BigramCounts()
    end.pairs[ord("l"), END] = 1
    end.pairs[ord("l"), 0] = 1
    zero = BigramCounts()
    zero.pairs[ord("l"), 0] = 1
    total += 2.0 ** -(bits_per_byte(train, end) - bits_per_byte(train, zero))
    assert total == pytest.approx(1.0)


def test_text_that_repeats_costs_little_and_noise_costs_all() -> None:
    repeated = counted(symbols_of(b"ab" * 5000))
    assert bits_per_byte(repeated, counted(symbols_of(b"ab" * 500))) < 0.1
    generator = np.random.default_rng(0)
    noise = [counted(generator.integers(0, 256, 2_000_000).tolist()) for _ in range(2)]
    assert bits_per_byte(*noise) == pytest.approx(8.0, abs=0.1)
