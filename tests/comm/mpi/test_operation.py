"""Operations in their order, driven by requests that the test completes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dthpc.comm.mpi.board import Board
from dthpc.comm.mpi.call import Call
from dthpc.comm.mpi.errors import CommunicationError, CommunicationTimeout
from dthpc.comm.mpi.lane import Lane
from dthpc.comm.mpi.operation import Operation, Steps, within
from dthpc.comm.mpi.progress import Progress


class Gate:
    """A request that is done once it is opened."""

    def __init__(self) -> None:
        self.open = False

    def Test(self) -> bool:
        return self.open


@pytest.fixture
def kept() -> list[object]:
    return []


@pytest.fixture
def lane(kept: list[object]) -> Lane:
    return Lane(Board(dist.HashStore(), "0", [4, 5], 0), kept.append)


def steps(log: list[str], name: str, *gates: Gate) -> Steps:
    for number, gate in enumerate(gates):
        log.append(f"{name}{number}")
        yield [gate]
    log.append(f"{name} over")
    return name


def operation(lane: Lane, steps: Steps, timeout_s: float = 20.0, staged: bool = False) -> Operation:
    return Operation(Call("operation"), steps, lane, timeout_s, staged=staged)


def test_who_drives_an_operation_starts_those_before_it_too(lane: Lane) -> None:
    log: list[str] = []
    gates = [Gate(), Gate()]
    started = [operation(lane, steps(log, name, gate)) for name, gate in zip("ab", gates, strict=True)]
    for one in started:
        lane.submit(one)
    assert log == []
    assert not started[1].poll()
    assert log == ["a0", "b0"]
    gates[1].open = True
    assert [one.poll() for one in started] == [False, True]
    gates[0].open = True
    started[0].wait()
    assert log == ["a0", "b0", "b over", "a over"]
    assert started[0].result == "a"


def test_nothing_starts_before_an_operation_of_several_steps_is_over(lane: Lane) -> None:
    log: list[str] = []
    first, second, third = Gate(), Gate(), Gate()
    stages = operation(lane, steps(log, "a", first, second), staged=True)
    following = operation(lane, steps(log, "b", third))
    lane.submit(stages)
    lane.submit(following)
    first.open = True
    assert not following.poll()
    assert log == ["a0"]
    assert not following.poll()
    assert log == ["a0", "a1"]
    second.open = third.open = True
    following.wait()  # drives the one before it
    assert log == ["a0", "a1", "a over", "b0", "b over"]


def test_an_error_in_a_step_ends_its_operation_only(lane: Lane) -> None:
    def failing() -> Steps:
        yield [gate]
        raise ValueError("no")

    gate = Gate()
    broken, sound = operation(lane, failing(), staged=True), operation(lane, steps([], "b", gate))
    lane.submit(broken)
    lane.submit(sound)
    gate.open = True
    with pytest.raises(ValueError, match="no"):
        broken.wait()
    sound.wait()
    lane.check()


def test_after_a_time_out_the_group_is_unusable_and_buffers_are_kept(lane: Lane, kept: list[object]) -> None:
    gate = Gate()
    late, waiting = operation(lane, steps([], "a", gate), 0.1, staged=True), operation(lane, steps([], "b", Gate()))
    lane.submit(late)
    lane.submit(waiting)
    with pytest.raises(CommunicationTimeout, match=r"operation 1, operation\(\) of group 0 \(ranks 4-5\) on rank 4"):
        late.wait()
    with pytest.raises(CommunicationError, match="was not started"):
        waiting.wait()
    with pytest.raises(CommunicationError, match="can't be used any more"):
        lane.submit(operation(lane, steps([], "c")))
    assert len(kept) == 1
    gate.open = True
    with pytest.raises(CommunicationTimeout):
        late.wait()


def test_a_wait_may_give_up_earlier_and_the_operation_goes_on(lane: Lane) -> None:
    gate = Gate()
    slow = operation(lane, steps([], "a", gate))
    lane.submit(slow)
    with pytest.raises(CommunicationTimeout, match="within the time given to wait"):
        slow.wait(0.05)
    gate.open = True
    slow.wait()


def test_callbacks_come_once_and_may_submit(lane: Lane) -> None:
    log: list[str] = []
    gate = Gate()
    first = operation(lane, steps(log, "a", gate), staged=True)
    second = operation(lane, steps(log, "b"))
    first.then(lambda _: lane.submit(second))
    lane.submit(first)
    gate.open = True
    first.wait()
    second.wait()
    first.then(lambda _: log.append("late"))
    assert log == ["a0", "a over", "b over", "late"]


@pytest.fixture
def progress() -> Iterator[Progress]:
    thread = Progress()
    yield thread
    thread.close()


def test_the_progress_thread_drives_what_nobody_waits_for(lane: Lane, progress: Progress) -> None:
    ended = threading.Event()
    gate, log = Gate(), list[str]()
    watched = operation(lane, steps(log, "a", gate))
    watched.then(lambda _: ended.set())
    lane.submit(watched)
    progress.watch(watched)
    gate.open = True
    assert ended.wait(20)
    assert log[-1] == "a over"


def test_the_progress_thread_runs_on_the_helper_cores(
    lane: Lane, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.sched_getaffinity(0)
    monkeypatch.setenv("DTHPC_HELPER_CPUS", str(max(mine)))
    ended, seen = threading.Event(), list[set[int]]()
    gate = Gate()
    watched = operation(lane, steps([], "a", gate))
    watched.then(lambda _: (seen.append(os.sched_getaffinity(0)), ended.set()))
    lane.submit(watched)
    progress.watch(watched)
    gate.open = True
    assert ended.wait(20)
    assert seen == [{max(mine)}]
    assert os.sched_getaffinity(0) == mine


def test_many_waiting_threads_and_the_progress_thread_take_each_step_once(lane: Lane, progress: Progress) -> None:
    log: list[str] = []
    gates = [Gate() for _ in range(50)]
    shared: Any = operation(lane, steps(log, "a", *gates), staged=True)
    lane.submit(shared)
    progress.watch(shared)
    threads = [threading.Thread(target=shared.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for gate in gates:
        time.sleep(0.0005)
        gate.open = True
    for thread in threads:
        thread.join(20)
    assert log == [*(f"a{number}" for number in range(50)), "a over"]


def test_draining_waits_for_all(lane: Lane) -> None:
    gate = Gate()
    lane.submit(operation(lane, steps([], "a", gate)))
    assert not lane.drain(0.02)
    gate.open = True
    assert lane.drain(20)


def test_steps_are_taken_in_their_context_and_nothing_between_them() -> None:
    def steps() -> Steps:
        yield [Gate()] if torch.is_grad_enabled() else []
        return torch.is_grad_enabled()

    taken = within(torch.no_grad, steps())
    assert next(taken) == []
    assert torch.is_grad_enabled()
    with pytest.raises(StopIteration) as end:
        next(taken)
    assert end.value.value is False
    assert torch.is_grad_enabled()
