from __future__ import annotations

import pytest

from dthpc.jobs.collectives.line import median, percentile
from dthpc.jobs.collectives.terms import OPERATIONS, bus_factor
from tests.jobs.collectives import tasks
from tests.ranks import pool


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["gloo", "raw_gloo"])
def test_every_operation_gives_the_right_result_on_every_rank(size: int, name: str) -> None:
    answers = pool().run(size, tasks.lines, size, name, "fp32", "sum", [8, 4096])
    assert all(answer == answers[0] for answer in answers)
    found = answers[0]
    assert {line["operation"] for line in found} == set(OPERATIONS)
    assert all(line["wrong"] == 0 for line in found)
    assert {line["in_place"] for line in found if line["operation"] == "all_gather"} == {False, True}
    for line in found:
        assert line["min_us"] <= line["p50_us"] <= line["p90_us"] <= line["p99_us"]
        assert line["iterations"] == 2
        if line["operation"] != "barrier":
            assert line["algbw"] == pytest.approx(line["size"] / line["p50_us"] / 1e3)
            assert line["busbw"] == pytest.approx(line["algbw"] * bus_factor(line["operation"], size))


@pytest.mark.parametrize(
    ("dtype", "redop"), [("bf16", "sum"), ("fp16", "avg"), ("int32", "max"), ("uint8", "sum"), ("fp64", "min")]
)
def test_all_formats_and_reductions_come_out_right(dtype: str, redop: str) -> None:
    for line in pool().run(3, tasks.lines, 3, "gloo", dtype, redop, [1200])[0]:
        assert line["wrong"] == 0, line


@pytest.mark.parametrize(
    ("operation", "in_place", "changed"),
    [
        ("all_reduce", True, [1, 1, 1]),
        ("all_gather", False, [1, 1, 1]),
        ("reduce_scatter", True, [1, 1, 1]),
        ("broadcast", True, [1, 1, 1]),
        ("reduce", True, [1, 0, 0]),
        ("gather", False, [1, 0, 0]),
        ("scatter", False, [1, 1, 1]),
        ("all_to_all", False, [1, 1, 1]),
        ("send_recv", False, [0, 1, 0]),
        ("sendrecv", False, [1, 1, 0]),
    ],
)
def test_a_single_wrong_element_is_counted_where_there_is_a_result(
    operation: str, in_place: bool, changed: list[int]
) -> None:
    assert pool().run(3, tasks.wrong_on_purpose, 3, operation, in_place) == changed


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 0.99) == 3
    assert (median([3.0, 1.0, 2.0]), median([4.0, 1.0])) == (2.0, 2.5)


def test_all_ranks_stop_if_one_was_asked_to() -> None:
    assert pool().run(3, tasks.stopped, 3, 1) == ["Stopped"] * 3
    assert pool().run(2, tasks.stopped, 2, 5) == ["went on"] * 2
