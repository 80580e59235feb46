from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from dthpc.parallel.pipeline import draw
from dthpc.parallel.pipeline.schedule import build

SVG = "{http://www.w3.org/2000/svg}"


def test_a_text_picture_is_to_scale() -> None:
    schedule = build("1f1b", 2, 1, 3)
    assert draw.text(schedule, draw.in_time(schedule)).splitlines() == [
        "rank 0 |F0|F1|.....|B0   |F2|B1   |..|B2   |",
        "rank 1 |..|F0|B0   |F1|B1   |F2|B2   |.....|",
    ]


def test_a_text_picture_names_the_stage_where_a_rank_has_several() -> None:
    schedule = build("zbv", 2, 2, 1)
    assert draw.text(schedule, draw.in_time(schedule)).splitlines() == [
        "rank 0 |0F0|.......|3F0|3I0|3W0|.......|0I0|0W0|",
        "rank 1 |...|1F0|2F0|.......|2I0|2W0|1I0|1W0|...|",
    ]


def test_lines_of_a_picture_are_equally_long() -> None:
    for name, ranks, chunks, micro_batches in (("zb_h1", 11, 1, 12), ("interleaved", 3, 2, 12), ("gpipe", 1, 1, 1)):
        schedule = build(name, ranks, chunks, micro_batches)
        lines = draw.text(schedule, draw.in_time(schedule)).splitlines()
        assert len(lines) == ranks
        assert len({len(line) for line in lines}) == 1


def test_an_svg_has_a_box_for_every_action_at_its_time() -> None:
    schedule = build("zb_h1", 3, 1, 4)
    root = ElementTree.fromstring(draw.svg(schedule, draw.in_time(schedule)))
    boxes = {box.findtext(f"{SVG}title"): box.find(f"{SVG}rect") for box in root.iter(f"{SVG}g")}
    assert len(boxes) == 3 * 4 * 3
    first = boxes["stage 0, forward, micro-batch 0, 0 to 1"]
    later = boxes["stage 2, input gradient, micro-batch 0, 3 to 4"]
    assert first is not None
    assert later is not None
    unit = float(first.get("width", ""))
    assert float(later.get("x", "")) - float(first.get("x", "")) == 3 * unit
    assert float(later.get("y", "")) > float(first.get("y", ""))
    assert later.get("fill") != first.get("fill")
    assert all(
        float(box.get("x", "")) + unit <= float(root.get("width", "")) for box in boxes.values() if box is not None
    )
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 2", "zb_h1, 3 ranks, 4 micro-batches", "weight gradient"} <= set(labels)
    assert "backward" not in labels


def test_chunks_of_a_rank_can_be_told_apart() -> None:
    schedule = build("interleaved", 2, 2, 2)
    root = ElementTree.fromstring(draw.svg(schedule, draw.in_time(schedule)))
    shades = {box.get("fill-opacity") for box in root.iter(f"{SVG}rect")} - {None}
    assert len(shades) == 2
