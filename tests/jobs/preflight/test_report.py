"""What people and programs read of a preflight."""

from __future__ import annotations

import json

from dthpc.config.preflight import PreflightChecks
from dthpc.jobs.preflight.judge import NodeReading
from dthpc.jobs.preflight.report import ROWS, Report
from dthpc.monitor.summary import report_tables


def report(count: int, slow: tuple[int, ...] = ()) -> Report:
    warning = "kernel.numa_balancing is on: steps of uneven length"
    readings = [
        NodeReading(f"n{i:03d}", "cpu", {"cpu_gflops": 20.0 if i in slow else 100.0}, (), (warning,))
        for i in range(count)
    ]
    return Report.of(readings, {"all_reduce_gb_s": 2.5, "all_reduce_us": 40.0}, PreflightChecks(), 3.0)


def test_the_line_to_paste_is_a_host_list() -> None:
    text = report(8, slow=(2, 3, 6)).text()
    assert "leave out: cluster.exclude=n[002-003,006] for the next submission" in text
    assert "BAD: n006: CPU GFLOP/s: 20, the others 100" in text
    assert text.count("BAD") == 6
    assert "all-reduce: 2.5 GB/s over all ranks (bus bandwidth), smallest message 40 µs" in text


def test_what_is_true_of_all_nodes_is_said_once() -> None:
    text = report(8).text()
    assert text.count("numa_balancing") == 1
    assert "warning: kernel.numa_balancing is on: steps of uneven length (all nodes)" in text
    assert "no node of 8 falls behind the others" in text


def test_a_large_cluster_is_not_printed_whole_and_bad_nodes_are() -> None:
    text = report(1000, slow=(999,)).text()
    assert len(text.splitlines()) < ROWS + 10
    assert "further: 935 good nodes more (preflight.json)" in text
    assert "BAD" in next(line for line in text.splitlines() if "n999" in line)


def test_json_holds_all_nodes_with_their_places() -> None:
    told = json.loads(json.dumps(report(3, slow=(1,)).to_json()))
    assert (told["schema"], told["bad"], told["exclude"]) == (1, ["n001"], "n001")
    assert [(node["place"], node["node"], node["bad"]) for node in told["nodes"]][-1] == (3, "n001", True)


def test_the_last_screen_shows_the_same() -> None:
    event = json.loads(json.dumps(report(3, slow=(1,)).event()))
    ((table,), rows) = (report_tables(event), event["rows"])
    assert table[2][-1][:3] == ["3", "n001", "BAD"]
    assert ["leave out", "cluster.exclude=n001 for the next submission"] in rows
    assert event["result"] == "bad nodes: n001"
