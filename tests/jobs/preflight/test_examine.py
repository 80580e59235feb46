"""Whole examinations by real ranks."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.preflight import tasks
from tests.ranks import pool

QUICK = {
    "doctor": False,
    "compute_s": 0.3,
    "memory_s": 0.1,
    "memory_mb": 4,
    "network_mb": 1,
    "files_mb": 4,
    "files": 5,
    # The ranks share cores, and these with whatever else the machine does, so that only what is done on purpose may
    # count: factors far beyond those, and none that depends on how far the other ranks lie apart.
    "compute_tolerance": 0.85,
    "memory_tolerance": 0.99,
    "network_tolerance": 0.99,
    "files_tolerance": 0.999,
    "outlier_z": 0.0,
    "two_nodes_factor": 1000.0,
    "clock_skew_s": 60.0,
}


def test_a_node_with_more_work_is_found_by_all_ranks_alike(tmp_path: Path) -> None:
    reports = pool().run(4, tasks.examined, str(tmp_path), 1, {**QUICK, "slowed": {"n2": 100}})
    assert all(report == reports[0] for report in reports)
    assert reports[0]["bad"] == ["n2"]
    assert reports[0]["exclude"] == "n2"
    assert reports[0]["nodes"][-1]["why"][0].startswith("CPU GFLOP/s: ")
    found = reports[0]["nodes"][0]["values"]
    names = {"cpu_gflops", "memory_gb_s", "pair_gb_s", "clock_s", "run_free_gb", "tmp_free_gb"}
    assert names | {f"{where}_{what}" for where in ("run", "tmp") for what in ("write_mb_s", "metadata_ms")} <= set(
        found
    )
    assert all(value > 0 for name, value in found.items() if name != "clock_s")
    assert not list(tmp_path.rglob("*preflight*")), "what was written to measure is removed"


def test_the_slowest_rank_of_a_node_speaks_for_it_and_pairs_add_up(tmp_path: Path) -> None:
    report = pool().run(4, tasks.examined, str(tmp_path), 2, {**QUICK, "files_mb": 0, "files": 0})[0]
    assert [node["node"] for node in sorted(report["nodes"], key=lambda node: node["node"])] == ["n0", "n1"]
    assert report["bad"] == []
    assert "run_write_mb_s" not in report["nodes"][0]["values"]
    assert report["group"]["all_reduce_gb_s"] > 0


def test_what_is_set_to_nought_is_left_out(tmp_path: Path) -> None:
    none = {
        "doctor": False,
        "compute_s": 0,
        "memory_s": 0,
        "network_mb": 0,
        "files_mb": 0,
        "files": 0,
        "clock_skew_s": 0,
    }
    report = pool().run(2, tasks.examined, str(tmp_path), 1, none)[0]
    assert set(report["nodes"][0]["values"]) == {"run_free_gb", "tmp_free_gb"}
    assert report["group"] == {}
