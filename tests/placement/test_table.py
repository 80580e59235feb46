from __future__ import annotations

import io
import json
from dataclasses import replace

from dthpc.placement.decide import decide
from dthpc.placement.draw import draw
from dthpc.placement.plan.nodes import Plan, decide_nodes
from dthpc.placement.plan.wish import Wish
from dthpc.placement.table import ROWS, placement_text, print_placement, rows_as_dicts
from tests.placement import nodes


def test_each_rank_has_a_line_with_the_reason() -> None:
    plan = decide_nodes([("n1", nodes.polaris()), ("n2", nodes.polaris())], Wish(4))
    head, *lines = placement_text(plan).splitlines()
    assert head.split() == ["rank", "node", "GPU", "cores", "helpers", "NUMA", "NIC", "why"]
    assert len(lines) == 8
    assert lines[5].split()[:7] == ["5", "n2", "GPU1", "16-21", "22-23", "2", "mlx5_1"]
    assert "mlx5_0 (far)" in lines[0]
    assert "none is near to GPU0" in lines[0]
    out = io.StringIO()
    print_placement(out, plan)
    assert out.getvalue() == placement_text(plan) + "\n"


def test_json_has_every_rank() -> None:
    plan = decide_nodes([("n1", nodes.mi250x())], Wish(8, reserve="l3"))
    rows = json.loads(json.dumps(list(rows_as_dicts(plan))))
    assert [row["rank"] for row in rows] == list(range(8))
    assert rows[4]["cpus"] == "1-7"
    assert rows[4]["gpus"][0]["name"] == "GPU4"
    assert rows[4]["nics"] == [{"name": "hsn2", "level": "NODE"}]


def test_a_long_table_is_cut_and_says_so() -> None:
    plan = decide_nodes([(f"n{i}", nodes.polaris()) for i in range(20)], Wish(4))
    text = placement_text(plan)
    assert f"… and {80 - ROWS} ranks more" in text
    assert len(text.splitlines()) == ROWS + 2


def test_what_is_left_is_told() -> None:
    text = placement_text(decide_nodes([("n", nodes.juwels_booster())], Wish(4, reserve="numa")))
    assert "left alone on request: CPUs 0,6,12,18,24,30,36,42,48" in text
    assert "no rank has cores 1-5,13-17,25-29,37-41" in text


def test_the_drawing_shows_what_is_near_to_what() -> None:
    lines = draw(nodes.mi250x()).splitlines()
    assert "64 cores of 2 threads, 8 GPUs" in lines[0]
    node = lines.index(next(line for line in lines if line.startswith("  memory node 3")))
    assert [line.split()[0] for line in lines[node + 1 :]] == ["L3", "L3", "GPU0", "GPU1", "hsn0", "NODE:", "SYS:"]
    assert "all GPUs reach each other by NV12" in draw(nodes.dgx_a100())
    assert "memory of GPU0" in draw(nodes.gh200())


def test_places_that_the_gpus_tell_have_no_rank() -> None:
    plan = replace(decide(nodes.polaris(), Wish(4)), by_gpu=True)
    head, *lines = placement_text(Plan((("n1", plan),))).splitlines()
    assert head.split()[:3] == ["node", "GPU", "cores"]
    assert "each rank has the place of the GPUs that it is shown" in lines
