from __future__ import annotations

import random

import pytest

from dthpc.jobs.collectives.fit import fit
from dthpc.jobs.collectives.terms import CostModel, ring

SIZES = [8.0 * 4**power for power in range(13)]


def test_exact_times_give_back_latency_and_bandwidth() -> None:
    model = ring(8)
    found = fit(model, [(size, model.seconds(size, 5e-6, 1e-10)) for size in SIZES])
    assert found is not None
    assert found.alpha_us == pytest.approx(5)
    assert found.bandwidth == pytest.approx(10)
    assert found.residual < 1e-9


def test_errors_tell_how_far_noisy_times_lead_astray() -> None:
    model, noise = CostModel("one message", 1, 1), random.Random(1)
    inside = 0
    for _ in range(200):
        points = [(size, model.seconds(size, 2e-5, 1e-9) * noise.gauss(1, 0.05)) for size in SIZES]
        found = fit(model, points)
        assert found is not None
        inside += abs(found.alpha_us - 20) < 2 * found.alpha_error_us
        inside += abs(found.beta_ns_per_kb - 1000) < 2 * found.beta_error_ns_per_kb
    # Two standard errors with eleven degrees of freedom hold 93 of 100.
    assert 0.85 < inside / 400 < 0.99


def test_small_sizes_count_as_much_as_large_ones() -> None:
    model = CostModel("one message", 1, 1)
    points = [(size, model.seconds(size, 1e-5, 1e-9)) for size in SIZES]
    points[-1] = (points[-1][0], points[-1][1] * 1.5)
    found = fit(model, points)
    assert found is not None
    assert found.alpha_us == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("seconds", "zero"), [(lambda n: 1e-5 / (1 + n / 1e4), "beta"), (lambda n: n * n, "alpha")])
def test_neither_latency_nor_time_a_byte_is_ever_negative(seconds: object, zero: str) -> None:
    found = fit(CostModel("one message", 1, 1), [(size, seconds(size)) for size in SIZES])  # type: ignore[operator]
    assert found is not None
    assert found.alpha_us >= 0
    assert found.beta_ns_per_kb >= 0
    assert (found.beta_ns_per_kb if zero == "beta" else found.alpha_us) == 0


def test_two_sizes_are_too_few() -> None:
    assert fit(ring(4), [(8.0, 1.0), (8.0, 1.1), (16.0, 2.0)]) is None
