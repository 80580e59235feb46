from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from dthpc.jobs.collectives.plots import bandwidth_svg, pairs_svg
from tests.jobs.collectives.results import line, matrix

NAME = "{http://www.w3.org/2000/svg}"


def test_each_operation_has_a_panel_and_each_backend_a_curve_with_its_values() -> None:
    lines = [
        line(operation, size, 10 + size / 1000, backend=backend)
        for operation in ("all_reduce", "all_gather", "broadcast", "reduce")
        for backend in ("gloo", "raw<gloo>")
        for size in (8, 4096, 1 << 20)
    ]
    root = ET.fromstring(bandwidth_svg("world: 2 ranks", lines, 8.0))
    panels = root.findall(f"{NAME}g")
    assert len(panels) == 4
    for panel in panels:
        points = panel.findall(f"{NAME}circle")
        assert len(points) == 6
        assert all(
            0 <= float(point.get("cx", "-1")) <= 250 and 0 <= float(point.get("cy", "-1")) <= 130 for point in points
        )
        # Larger sizes lie to the right, and what is quicker lies higher.
        assert [float(p.get("cx", "0")) for p in points[:3]] == sorted(float(p.get("cx", "0")) for p in points[:3])
        assert [float(p.get("cy", "0")) for p in points[:3]] == sorted(
            (float(p.get("cy", "0")) for p in points[:3]), reverse=True
        )
    assert "raw<gloo>" in {text.text for text in root.iter(f"{NAME}text")}
    assert sum("the link" in (title.text or "") for title in root.iter(f"{NAME}title")) == 4


def test_a_single_point_can_be_drawn() -> None:
    assert ET.fromstring(bandwidth_svg("world", [line("all_reduce", 8, 10.0)], None)).findall(f"{NAME}g")


@pytest.mark.parametrize("members", [2, 12, 13, 60])
def test_a_heat_map_has_a_cell_for_each_pair_and_borders_around_slow_ones(members: int) -> None:
    root = ET.fromstring(pairs_svg(matrix(slow_node=1 if members > 2 else None, members=members)))
    cells = root.findall(f"{NAME}g/{NAME}rect")
    assert len(cells) == members * (members - 1)
    slow = [cell for cell in cells if cell.get("stroke") == "#d40000"]
    assert len(slow) == (2 * (members - 1) if members > 2 else 0)
    assert root.find(f"{NAME}g/{NAME}title") is not None
