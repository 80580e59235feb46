from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

from dthpc.monitor.events import EventLog, read_events


def test_events_come_back_in_order_with_the_writers_common_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=2)
    log.write("step", step=1, loss=0.5)
    log.write("step", step=2, loss=float("nan"))
    events, offset = read_events(tmp_path / "events.jsonl")
    assert [(e["kind"], e["attempt"], e["step"]) for e in events] == [("step", 2, 1), ("step", 2, 2)]
    assert events[1]["loss"] == "nan"
    log.write("end")
    events, _ = read_events(tmp_path / "events.jsonl", offset)
    assert [e["kind"] for e in events] == ["end"]


def test_a_torn_last_line_waits_and_does_not_swallow_the_next_writers_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("whole")
    with open(path, "ab") as file:
        file.write(b'{"kind":"to')
    events, offset = read_events(path)
    assert [e["kind"] for e in events] == ["whole"]
    EventLog(path).write("after")
    events, _ = read_events(path, offset)
    assert [e["kind"] for e in events] == ["after"]


def test_an_absent_file_holds_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "absent") == ([], 0)


def _write_many(path: Path, writer: int) -> None:
    log = EventLog(path)
    for number in range(500):
        log.write("n", writer=writer, number=number, padding="x" * (number % 300))


def test_writers_in_several_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = path.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 1500
