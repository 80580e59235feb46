from __future__ import annotations

import pytest

from dthpc.comm.watchdog.recorder import Recorder
from dthpc.comm.watchdog.waiting import record_with, stop_recording, waiting


class Group:
    group_name = "pipeline"


def test_a_wait_is_seen_while_it_lasts_and_one_that_fails_is_kept() -> None:
    recorder, group = Recorder(10), Group()
    with waiting(group, "recv", 1):
        pass
    record_with(recorder)
    try:
        with waiting(group, "recv", 1):
            (wait,) = recorder.waits()
            assert wait.entry is not None
            assert (wait.entry.operation, wait.entry.peer, wait.entry.state) == ("recv", 1, "called")
        assert not list(recorder.waits())
        with pytest.raises(ValueError, match="no"), waiting(group, "recv", 2):
            raise ValueError("no")
    finally:
        stop_recording(recorder)
    with waiting(group, "recv", 1):
        pass
    assert [(entry.peer, entry.state) for entry in recorder.entries] == [(1, "finished"), (2, "failed")]
