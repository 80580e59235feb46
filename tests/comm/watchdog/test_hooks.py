from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dthpc.comm.watchdog.hooks import Hooks
from dthpc.comm.watchdog.recorder import Recorder
from tests.comm.watchdog import tasks
from tests.ranks import pool


class Done(dist.Work):  # type: ignore[misc]
    """Work that is done."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Alone(dist.ProcessGroup):  # type: ignore[misc]
    """A group written in Python, of one rank, that can do one thing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        tensors[0].add_(1)
        return Done()


def test_hooks_leave_nothing_behind() -> None:
    assert pool().run(2, tasks.untouched) == [True, True]


def test_a_group_written_in_python_is_recorded_and_what_it_lacks_is_refused_as_before() -> None:
    group, recorder = Alone(), Recorder(10)
    hooks = Hooks(recorder)
    hooks.add(type(group))
    try:
        tensor = torch.zeros(2)
        work = group.allreduce([tensor])
        assert work.wait()
        assert tensor.tolist() == [1, 1]
        # torch looks for a Python method from C++; it must not take the wrapper of the inherited one for an override.
        with pytest.raises(RuntimeError):
            group.broadcast([tensor], dist.BroadcastOptions())
    finally:
        hooks.remove()
    assert [(entry.operation, entry.state) for entry in recorder.entries] == [
        ("allreduce", "finished"),
        ("broadcast", "failed"),
    ]
    assert "wait" in Done.__dict__
    assert Done.__dict__["wait"].__module__ == __name__
