from __future__ import annotations

from dthpc.jobs.collectives.report import Results, cut, full_table, pair_tables, summary_rows, summary_table, to_json
from tests.jobs.collectives.results import line, matrix


def results() -> Results:
    lines = [line("all_reduce", size, 10.0 + size / 100) for size in (8, 1000, 100_000)]
    raw = [line("all_reduce", size, 5.0 + size / 100, backend="raw_gloo") for size in (8, 1000, 100_000)]
    made = Results(["n0", "n1"], [*lines, *raw, line("barrier", 0, 30.0, busbw=0.0)], [matrix(2)], link_gbps=0.8)
    made.bisection = [line("sendrecv", 1000, 10.0, ranks=4)]
    return made


def test_json_holds_every_line_with_its_part_of_the_link_and_the_fits() -> None:
    told = to_json(results(), {"dtype": "fp32"})
    assert (told["schema"], told["result"], len(told["lines"])) == (1, "ok", 7)
    assert abs(told["lines"][2]["link_share"] - 100_000 / 1010 / 1e3 / 0.1) < 1e-9
    fits = {(fit["operation"], fit["backend"]): fit for fit in told["fits"]}
    # A ring of two has two messages one after the other, and moves each byte once.
    assert abs(fits["all_reduce", "gloo"]["alpha_us"] - 5) < 1e-6
    assert abs(fits["all_reduce", "gloo"]["beta_ns_per_kb"] - 10_000) < 1e-3
    assert told["pairs"][0]["bandwidth"][0] == [None, 1.0, 0.1, 1.0]
    assert told["pairs"][0]["slow"][0]["members"] == ["n2"]


def test_the_full_table_has_nccl_tests_columns() -> None:
    head, first, *_ = full_table(results()).splitlines()
    for title in ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"):
        assert title in head.split()
    assert first.split()[:6] == ["world", "gloo", "all_reduce", "8", "2", "fp32"]


def test_the_summary_has_a_row_for_each_kind_and_compares_with_the_raw_library() -> None:
    table = summary_table(results())
    titles = [title for title, _ in table["columns"]]
    rows = [dict(zip(titles, row, strict=True)) for row in table["rows"]]
    assert [(row["operation"], row["backend"]) for row in rows] == [
        ("all_reduce", "gloo"), ("all_reduce", "raw_gloo"), ("barrier", "gloo"),
    ]  # fmt: skip
    assert (rows[0]["p50 µs"], rows[0]["best busbw"], rows[0]["of link"]) == ("10.1", "99.0 MB/s", "99%")
    assert rows[0]["of raw"] == "1.00 ×"
    assert rows[2]["best busbw"] == ""


def test_pairs_are_shown_unless_they_are_too_many() -> None:
    (table,) = pair_tables([matrix(), matrix(members=20)])
    assert [title for title, _ in table["columns"]] == ["from \\ to", "n0", "n1", "n2", "n3"]
    assert table["rows"][1] == ["n1", "1.00 GB/s", "–", "1.00 GB/s", "1.00 GB/s"]


def test_the_cut_counts_both_ways_of_all_pairs() -> None:
    assert abs(cut(line("sendrecv", 1000, 10.0, ranks=5)) - 4 * 0.1) < 1e-9
    assert ["bisection", "400 MB/s both ways between halves of 4 ranks, 1000 B (gloo)"] in summary_rows(results())
