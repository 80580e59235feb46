from __future__ import annotations

from dthpc.comm.watchdog.recorder import Recorder
from tests.comm.watchdog import tasks
from tests.ranks import pool


def test_every_call_of_python_is_recorded_with_number_form_and_place() -> None:
    for rank, calls in enumerate(pool().run(2, tasks.recorded, 2)):
        own = [call for call in calls if call["operation"] not in ("send", "recv")]
        world = [call for call in own if call["group"] == calls[0]["group"]]
        operations = [call["operation"] for call in world]
        assert operations[:5] == ["allreduce", "allgather", "allgather", "broadcast", "allgather"]
        assert [call["sequence"] for call in world] == list(range(1, len(world) + 1))
        assert (world[0]["shape"], world[0]["dtype"]) == ([4, 5], "float32")
        assert (world[3]["shape"], world[3]["dtype"]) == ([3], "int64")
        assert all("tests/comm/watchdog/tasks.py:" in call["place"] for call in calls), calls
        messages = [call for call in calls if call["operation"] in ("send", "recv")]
        assert messages[0]["operation"] == ("send", "recv")[rank]
        assert messages[0]["peer"] == 1 - rank
        # Those of our own channel are seen as well.
        assert {(call["operation"], call["peer"], *call["shape"]) for call in messages[1:]} == {
            ("send", 1 - rank, 7),
            ("recv", 1 - rank, 7),
        }
        assert calls[-1]["operation"] == "barrier"
        assert calls[-1]["group"] != calls[0]["group"]
        assert {call["state"] for call in calls} == {"finished"}


def test_a_call_is_in_flight_until_the_others_come_and_one_that_raises_has_failed() -> None:
    first, second = pool().run(2, tasks.states)
    assert first == ["in flight", "finished", "failed"]
    assert second == ["finished", "failed"]


def test_only_the_last_calls_are_remembered() -> None:
    class Group:
        group_name = "g"

    recorder, group = Recorder(3), Group()
    for _ in range(5):
        recorder.end(recorder.begin(group, "barrier", ()), None)
    assert [entry.sequence for entry in recorder.entries] == [3, 4, 5]
    assert list(recorder.waits()) == []


def test_a_call_that_is_not_back_counts_as_waited_for() -> None:
    class Group:
        group_name = "g"

    recorder, group = Recorder(3), Group()
    entry = recorder.begin(group, "barrier", ())
    assert [wait.entry for wait in recorder.waits()] == [entry]
    assert entry.state == "called"
    recorder.fail(entry)
    assert list(recorder.waits()) == []
    assert [wait.entry for wait in recorder.failures()] == [entry]


def test_collectives_over_memory_are_recorded_under_one_name_on_all_ranks() -> None:
    first, second = pool().run(2, tasks.over_memory)
    for reduced, before, after in (first, second):
        assert (reduced["operation"], reduced["shape"], reduced["state"]) == ("all_reduce", [17], "finished")
        assert [before["state"], after["state"]] == ["in flight", "finished"]
        assert reduced["group"] == first[0]["group"] == "memory of ranks [0, 1]"
