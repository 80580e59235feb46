from __future__ import annotations

import json

from dthpc.jobs.collectives.judge import doubts, judge, rate, verdict
from dthpc.jobs.collectives.report import Results, to_json
from tests.jobs.collectives.results import line, matrix

# 10 ms for 10 MB is 1 GB/s: 8 Gbit/s.
GOOD = [line("all_reduce", 8, 20.0), line("all_reduce", 10_000_000, 10_000.0)]


def stored(**parts: object) -> object:
    return json.loads(json.dumps(to_json(Results(["n0", "n1"], **parts), {})))  # type: ignore[arg-type]


def test_what_uses_the_link_is_fine() -> None:
    assert judge(GOOD, [matrix()], 8.0, None, 0.8) == []
    assert verdict([]) == "ok"


def test_without_a_rate_or_a_reference_only_the_links_are_compared() -> None:
    (found,) = judge(GOOD, [matrix(slow_node=2)], None, None, 0.8)
    assert (found.kind, found.where, verdict([found])) == ("node", "n2", "slow")
    assert found.ratio is not None
    assert abs(found.ratio - 0.1) < 1e-9
    for part in ("n2", "to and from everybody", "100 MB/s", "10%", "1.00 GB/s", "below 80%", "NIC"):
        assert part in found.words


def test_operations_that_leave_the_link_idle_are_told_by_their_largest_size() -> None:
    slow = [*GOOD, line("all_gather", 1 << 20, 500.0), line("all_gather", 10_000_000, 20_000.0)]
    (found,) = judge(slow, [], 8.0, None, 0.8)
    assert found.where == "all_gather over world (gloo)"
    assert "50% of the link's 8 Gbit/s" in found.words


def test_trees_roots_and_what_stays_in_a_node_are_not_held_against_the_link() -> None:
    lines = [line("broadcast", 10_000_000, 90_000.0), line("all_reduce", 10_000_000, 90_000.0, link_load=0.0)]
    assert judge(lines, [], 8.0, None, 0.8) == []


def test_links_that_are_all_alike_and_all_slow_are_told_by_the_rate() -> None:
    (found,) = judge([], [matrix()], 100.0, None, 0.8)
    assert (found.kind, found.where) == ("link", "all pairs of nodes")
    assert "8% of the link's 100 Gbit/s" in found.words


def test_a_reference_tells_latency_and_bandwidth_apart_and_names_links() -> None:
    before = stored(lines=GOOD, matrices=[matrix()])
    assert judge(GOOD, [matrix()], None, before, 0.8) == []
    now = [line("all_reduce", 8, 60.0), GOOD[1]]
    found = judge(now, [], None, before, 0.8)
    assert ["up to 8.00 KiB takes 3.00 times" in each.words for each in found] == [True]
    large = judge([GOOD[0], line("all_reduce", 10_000_000, 20_000.0)], [], None, before, 0.8)
    assert ["from 1.00 MiB on takes 2.00 times" in each.words for each in large] == [True]
    worse = matrix()
    worse.bandwidth[1, 3] = 0.5
    assert [each.where for each in judge([], [worse], None, before, 0.8)] == ["n1 → n3"]


def test_lines_of_other_sizes_formats_or_ranks_are_not_compared() -> None:
    before = stored(lines=GOOD)
    others = [line("all_reduce", 8, 900.0, ranks=4), line("all_reduce", 8, 900.0, dtype="bf16")]
    assert judge(others, [], None, before, 0.8) == []


def test_a_wrong_result_outweighs_all() -> None:
    found = judge([line("all_reduce", 4096, 10.0, wrong=3)], [matrix(slow_node=0)], None, None, 0.8)
    assert verdict(found) == "wrong"
    assert found[0].words.startswith("all_reduce over world (gloo): 3 elements of 4.00 KiB")


def test_what_is_quicker_than_the_link_is_doubted() -> None:
    (doubt,) = doubts([*GOOD, line("all_reduce", 10_000_000, 1000.0, backend="mpi")], 8.0)
    assert doubt.startswith("mpi reaches 10.0 times the link's 8 Gbit/s")
    assert doubts(GOOD, 8.0) == doubts(GOOD, None) == []


def test_rates_have_three_figures() -> None:
    assert [rate(value) for value in (2.1, 12.34, 0.9996, 0.5, 0.0021)] == [
        "2.10 GB/s", "12.3 GB/s", "1.00 GB/s", "500 MB/s", "2.10 MB/s",
    ]  # fmt: skip
