from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.monitor.events import EventLog, read_events
from dthpc.monitor.tail import read_tail


@pytest.fixture
def long_record(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, attempt=0)
    log.write("run_submitted", job_id="7")
    log.write("train_start", total_steps=5000)
    for step in range(1, 5001):
        log.write("step", step=step, loss=3.0 / step)
        if step in (1000, 2000):
            log.write("eval", step=step, loss=2.0)
    log.close()
    return path


def kinds(events: list[dict[str, object]]) -> set[object]:
    return {event["kind"] for event in events}


def test_it_finds_the_newest_of_each_kind_without_the_rest(long_record: Path) -> None:
    tail = read_tail(long_record, ("run_submitted", "train_start", "step", "eval"), block=2048, limit=10**9)
    assert kinds(tail.events) == {"run_submitted", "train_start", "step", "eval"}
    assert [event["step"] for event in tail.events if event["kind"] == "eval"] == [2000]
    assert tail.events[-1]["step"] == 5000
    assert len(tail.events) < 100


def test_events_come_in_the_order_of_the_file(long_record: Path) -> None:
    events = read_tail(long_record, ("train_start", "eval", "step"), block=2048, limit=10**9).events
    assert [event["kind"] for event in events][:3] == ["train_start", "eval", "step"]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == sorted(steps)


def test_the_limit_bounds_the_search_but_the_first_block_is_still_looked_at(long_record: Path) -> None:
    found = kinds(read_tail(long_record, ("train_start", "eval"), block=2048, limit=4096).events)
    assert "train_start" in found
    assert "eval" not in found


def test_reading_goes_on_at_the_offset(long_record: Path) -> None:
    tail = read_tail(long_record, ())
    assert read_events(long_record, tail.offset) == ([], long_record.stat().st_size)
    log = EventLog(long_record)
    log.write("train_end", step=5000)
    events, _ = read_events(long_record, tail.offset)
    assert [event["kind"] for event in events] == ["train_end"]


def test_a_torn_last_line_is_left_for_later(long_record: Path) -> None:
    whole = long_record.stat().st_size
    with open(long_record, "ab") as file:
        file.write(b'{"time":1,"kind":"ev')
    tail = read_tail(long_record, ("step",))
    assert tail.offset == whole
    assert tail.events[-1]["step"] == 5000


def test_garbage_between_the_lines_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"eval","loss":1}\n\x00\xff\x00{"kind":"eval"\n[1]\n{"kind":"step","step":3}\n')
    tail = read_tail(path, ("eval",), block=24)
    assert [event["kind"] for event in tail.events] == ["eval", "step"]


def test_a_line_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("step", step=1)
    log.write("incident", what="x" * 5000)
    assert kinds(read_tail(path, ("step",), block=64).events) == {"step", "incident"}


@pytest.mark.parametrize("content", [None, b"", b"\n", b'{"kind":'])
def test_nothing_whole_is_no_event(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert read_tail(path, ("step",)).events == []
