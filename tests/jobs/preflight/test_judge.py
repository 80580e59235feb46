"""Who is called bad, and who never is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dthpc.config.preflight import PreflightChecks
from dthpc.jobs.preflight.judge import NodeReading, judge, outliers

CHECKS = PreflightChecks()
BASE = {"cpu_gflops": 100.0, "memory_gb_s": 20.0, "pair_gb_s": 10.0, "run_metadata_ms": 1.0, "clock_s": 0.0}


def reading(node: str, kind: str = "cpu", errors: tuple[str, ...] = (), **values: float) -> NodeReading:
    return NodeReading(node, kind, {**BASE, **values}, errors)


def bad(readings: list[NodeReading], **checks: Any) -> dict[str, tuple[str, ...]]:
    return {verdict.node: verdict.why for verdict in judge(readings, PreflightChecks(**checks)) if verdict.bad}


def alike(count: int, *more: NodeReading) -> list[NodeReading]:
    return [*(reading(f"n{i}", cpu_gflops=100.0 + i % 3) for i in range(count)), *more]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cpu_gflops": 60.0}, "CPU GFLOP/s: 60, the others 101"),
        ({"memory_gb_s": 12.0}, "memory GB/s: 12, the others 20"),
        ({"pair_gb_s": 3.0}, "pair GB/s: 3, the others 10"),
        ({"run_metadata_ms": 40.0}, "run metadata ms: 40, the others 1"),
        ({"clock_s": -7.25}, "its clock differs by -7.25 s"),
        ({"tmp_free_gb": 0.25}, "TMPDIR has 0.25 GiB free"),
    ],
)
def test_a_node_that_falls_behind_is_named_with_what_it_shows(values: dict[str, float], told: str) -> None:
    assert bad(alike(5, reading("slow", **values))) == {"slow": (told,)}


def test_a_faster_node_is_never_bad() -> None:
    assert bad(alike(5, reading("fast", cpu_gflops=300.0, run_metadata_ms=0.01))) == {}


def test_a_difference_that_stands_out_and_matters_little_is_no_reason() -> None:
    # Where all are alike to the last digit, one percent is many deviations.
    assert bad([*(reading(f"n{i}") for i in range(8)), reading("odd", cpu_gflops=99.0)]) == {}


def test_where_all_differ_much_nobody_stands_out() -> None:
    speeds = [40.0, 60.0, 80.0, 100.0, 120.0, 140.0]
    assert bad([reading(f"n{i}", cpu_gflops=speed) for i, speed in enumerate(speeds)]) == {}


def test_noise_of_the_size_of_the_tolerance_names_nobody() -> None:
    draw = random.Random(5)
    for _ in range(200):
        nodes = [reading(f"n{i}", cpu_gflops=100 * (1 + draw.uniform(-0.07, 0.07))) for i in range(draw.randint(2, 40))]
        assert bad(nodes) == {}


def test_several_bad_nodes_do_not_hide_each_other() -> None:
    slow = [reading(f"slow{i}", cpu_gflops=50.0) for i in range(3)]
    assert set(bad(alike(7, *slow))) == {"slow0", "slow1", "slow2"}


@pytest.mark.parametrize(("speed", "named"), [(45.0, False), (30.0, True)])
def test_of_two_nodes_one_is_bad_only_where_it_is_slower_by_a_large_factor(speed: float, named: bool) -> None:
    assert bool(bad([reading("a"), reading("b", cpu_gflops=speed)])) == named
    assert outliers({"a": 100.0, "b": 1.0, "c": 1.0}, 0.1, 3.5, 3.0) == {}


def test_of_one_link_and_of_two_clocks_neither_end_is_to_blame() -> None:
    assert bad([reading("a", pair_gb_s=1.0, clock_s=0.0), reading("b", pair_gb_s=10.0, clock_s=60.0)]) == {}


def test_nodes_are_compared_with_their_like() -> None:
    old = [reading(f"old{i}", kind="older cpu", cpu_gflops=40.0) for i in range(3)]
    assert bad(alike(5, *old)) == {}
    assert set(bad([*alike(5, *old), reading("older", kind="older cpu", cpu_gflops=20.0)])) == {"older"}


def test_an_error_of_some_nodes_makes_them_bad_and_one_of_all_is_the_sites() -> None:
    errors = [f"GPU{i} counts {i + 1} memory errors: results may be wrong" for i in range(6)]
    one = [*alike(5), reading("n9", errors=(errors[3],))]
    assert bad(one) == {"n9": (errors[3],)}
    # The same trouble with other numbers is the same trouble.
    assert bad([reading(f"n{i}", errors=(errors[i],)) for i in range(6)]) == {}


def test_the_best_node_stands_first_and_bad_ones_last() -> None:
    nodes = [
        reading("b", cpu_gflops=95.0),
        reading("slow", memory_gb_s=2.0),
        reading("a", cpu_gflops=105.0),
        reading("c"),
    ]
    verdicts = judge(nodes, CHECKS)
    assert [verdict.node for verdict in verdicts] == ["a", "c", "b", "slow"]
    assert (verdicts[-1].worst, verdicts[-1].relative) == ("memory_gb_s", pytest.approx(0.1))
    assert verdicts[-2].worst == "cpu_gflops"


def test_a_node_alone_is_compared_with_nothing() -> None:
    (verdict,) = judge([reading("only", errors=("a port is down",))], CHECKS)
    assert (verdict.bad, verdict.relative) == (False, None)
