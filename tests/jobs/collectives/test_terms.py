from __future__ import annotations

import math

import pytest

from dthpc.jobs.collectives.terms import (
    COLLECTIVES,
    OPERATIONS,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    model_of,
    node_traffic,
    rabenseifner,
    recursive_doubling,
    ring,
)


def test_bandwidths_are_those_that_nccl_tests_prints() -> None:
    size, seconds = 17179869184, 127997e-6
    assert algorithm_bandwidth(size, seconds) == pytest.approx(134.22, abs=0.005)
    assert bus_bandwidth("all_reduce", 8, size, seconds) == pytest.approx(234.89, abs=0.005)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("gather", 0.875),
        ("scatter", 0.875),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bus_factors_for_eight_ranks(operation: str, factor: float) -> None:
    assert bus_factor(operation, 8) == factor


@pytest.mark.parametrize(
    ("model", "large_ms", "small_us"),
    [(ring(64), 42.91, 632.6), (rabenseifner(64), 42.34, 62.6), (recursive_doubling(64), 128.88, 37.9)],
)
def test_costs_are_those_of_the_paper_s_formulas(model: object, large_ms: float, small_us: float) -> None:
    alpha, beta = 5e-6, 1 / 50e9
    assert model.seconds(1 << 30, alpha, beta) * 1e3 == pytest.approx(large_ms, abs=0.01)  # type: ignore[attr-defined]
    assert model.seconds(1 << 16, alpha, beta) * 1e6 == pytest.approx(small_us, abs=0.06)  # type: ignore[attr-defined]


@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_with_one_rank_a_node_the_link_carries_the_bus_traffic(operation: str, nodes: int) -> None:
    assert node_traffic(operation, nodes, nodes) == pytest.approx(bus_factor(operation, nodes))


def test_more_ranks_a_node_need_not_send_more_over_the_link_but_for_what_is_each_rank_s_own() -> None:
    assert node_traffic("all_reduce", 16, 2) == 1
    assert node_traffic("all_to_all", 16, 2) == 4
    assert node_traffic("sendrecv", 16, 2) == 8
    assert node_traffic("all_reduce", 16, 1) == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_model_moves_fewer_bytes_than_the_bus_must(operation: str, backend: str, ranks: int) -> None:
    model = model_of(operation, backend, ranks)
    assert model.latencies >= 1
    if operation != "barrier":
        assert model.volume >= bus_factor(operation, ranks) - 1e-9
    assert math.isfinite(model.seconds(1, 1, 1))
