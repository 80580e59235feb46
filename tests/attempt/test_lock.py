from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dthpc.attempt.lock import Holder, RunLock, ensure_free, process_start, read_holder
from dthpc.errors import UserError
from dthpc.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def dead_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def write(run: RunDir, holder: Holder) -> None:
    run.lock.write_text(json.dumps(asdict(holder)))


def me(**fields: object) -> Holder:
    return replace(Holder.myself({}), **fields)  # type: ignore[arg-type]


def test_a_lock_is_taken_named_and_given_back(run: RunDir) -> None:
    lock = RunLock(run)
    lock.acquire()
    holder = read_holder(run.lock)
    assert holder == lock.holder
    assert (holder.pid, lock.still_mine()) == (os.getpid(), True)
    lock.release()
    assert [path.name for path in run.path.iterdir()] == [".lock.guard"]


def test_a_living_holder_is_respected_and_told(run: RunDir) -> None:
    RunLock(run).acquire()
    with pytest.raises(UserError, match=rf"already running: process {os.getpid()} on .*kill {os.getpid()}"):
        RunLock(run).acquire()
    with pytest.raises(UserError, match="already running"):
        ensure_free(run)
    assert {path.name for path in run.path.iterdir()} == {"lock", ".lock.guard"}


def test_the_lock_of_a_dead_process_is_taken_over(run: RunDir) -> None:
    dead = me(pid=dead_process().pid, pid_start="1")
    write(run, dead)
    ensure_free(run)
    lock = RunLock(run)
    lock.acquire()
    assert lock.still_mine()


def test_a_process_id_that_was_used_again_is_not_the_holder(run: RunDir) -> None:
    write(run, me(pid_start="1"))
    lock = RunLock(run)
    lock.acquire()
    assert lock.still_mine()


def test_a_zombie_is_dead() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(zombie.pid) is None
    zombie.wait()
    assert process_start(os.getpid()) == Holder.myself({}).pid_start


def test_the_same_slurm_job_never_runs_twice(run: RunDir) -> None:
    # Its node was given up, and the job starts elsewhere: the old keeper may even be alive behind a cut cable.
    write(run, me(job_id="7"))
    lock = RunLock(run, Holder.myself({"SLURM_JOB_ID": "7"}))
    lock.acquire(lambda job: pytest.fail(f"Slurm needs not be asked about {job}"))
    assert lock.still_mine()


@pytest.mark.parametrize(("ended", "taken"), [(True, True), (False, False), (None, False)])
def test_on_another_machine_the_slurm_job_tells(run: RunDir, ended: bool | None, taken: bool) -> None:
    write(run, me(machine="elsewhere", host="n7", job_id="7"))
    lock = RunLock(run, Holder.myself({"SLURM_JOB_ID": "8"}))
    asked: list[str] = []

    def job_ended(job: str) -> bool | None:
        asked.append(job)
        return ended

    if taken:
        lock.acquire(job_ended)
    else:
        with pytest.raises(UserError, match="n7 in Slurm job 7"):
            lock.acquire(job_ended)
    assert asked == ["7"]
    assert lock.still_mine() is taken


def test_on_another_machine_without_a_job_the_user_is_told_what_to_do(run: RunDir) -> None:
    write(run, me(machine="elsewhere", host="n7"))
    with pytest.raises(UserError, match=f"can't be seen from .* rm {run.lock}"):
        RunLock(run).acquire()
    ensure_free(run)


def test_a_lock_of_another_form_is_not_removed(run: RunDir) -> None:
    run.lock.write_text('{"held": "by a newer version"}')
    with pytest.raises(UserError, match="unknown form"):
        RunLock(run).acquire()
    assert run.lock.exists()


def damage(run: RunDir, content: bytes, age_s: float = 60.0) -> None:
    run.lock.write_bytes(content)
    moment = time.time() - age_s
    os.utime(run.lock, (moment, moment))


def begun(run: RunDir, holder: Holder) -> None:
    """An attempt that nothing recorded the end of."""
    start = {**asdict(holder), "slurm_job_id": holder.job_id}
    run.attempt(0).path.mkdir(parents=True)
    run.attempt(0).start.write_text(json.dumps(start))


DAMAGED = [b"", b'{"token": "ab', b"\x00\xff" * 40]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_lock_is_taken_over_where_no_keeper_lives(
    run: RunDir, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, content)
    begun(run, me(pid=dead_process().pid, pid_start="1"))
    ensure_free(run)
    lock = RunLock(run)
    lock.acquire()
    assert read_holder(run.lock) == lock.holder
    assert f"{run.lock} is empty or damaged" in capsys.readouterr().out
    lock.release()
    assert not run.lock.exists()


def test_a_damaged_lock_of_a_living_keeper_is_respected(run: RunDir) -> None:
    damage(run, b"")
    begun(run, me())
    for take in (RunLock(run).acquire, lambda: ensure_free(run)):
        with pytest.raises(UserError, match=f"already running: process {os.getpid()}"):
            take()
    assert run.lock.exists()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_damaged_lock_that_is_new_or_may_be_in_use_elsewhere_is_told_with_what_to_do(
    run: RunDir, elsewhere: bool
) -> None:
    damage(run, b"", age_s=60.0 if elsewhere else 0.0)
    if elsewhere:
        begun(run, me(machine="elsewhere", host="n7"))
    for take in (RunLock(run).acquire, lambda: ensure_free(run)):
        with pytest.raises(UserError, match=f"unknown form.*rm {run.lock}"):
            take()
    assert run.lock.exists()


def test_a_lock_that_was_taken_over_is_not_given_back(run: RunDir) -> None:
    first = RunLock(run, me(job_id="7"))
    first.acquire()
    second = RunLock(run, Holder.myself({"SLURM_JOB_ID": "7"}))
    second.acquire()
    assert not first.still_mine()
    first.release()
    assert second.still_mine()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.root=.*can't be written"):
        RunLock(RunDir(tmp_path / "absent")).acquire()


def test_one_of_many_gets_a_dead_lock(run: RunDir) -> None:
    write(run, me(pid=dead_process().pid, pid_start="1"))
    barrier = threading.Barrier(8)
    got: list[RunLock] = []

    def take() -> None:
        lock = RunLock(run)
        barrier.wait()
        try:
            lock.acquire()
        except UserError:
            return
        got.append(lock)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lock.still_mine() for lock in got] == [True]
    assert {path.name for path in run.path.iterdir()} == {"lock", ".lock.guard"}
