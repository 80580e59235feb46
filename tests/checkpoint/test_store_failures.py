"""Kills, full disks and other ends of a save: the older checkpoint is used, nothing half-made is loadable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dthpc.checkpoint import store
from dthpc.checkpoint.errors import CheckpointError, StorageError
from dthpc.checkpoint.manifest import latest_verified
from tests.checkpoint.harness import kill_at, limit_file_size, results, run_ranks
from tests.checkpoint.jobs import build, fingerprint, train

Fingerprints = dict[int, dict[str, str]]


def save_two(rank: int, root: Path) -> Any:
    job = build("ddp")
    prints = {}
    for step in (1, 2):
        train(job, step - 1, step, rank)
        prints[step] = fingerprint(job)
        store.save(root / f"until-{step}", step, job.state, attempt=0)
    return prints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fingerprints]:
    """A folder of checkpoints that holds step 1, and what the job is after steps 1 and 2."""
    root = tmp_path_factory.mktemp("saved")
    return root / "until-1", results(run_ranks(2, save_two, root))[0]


def save_and_be_killed(rank: int, root: Path, point: int, victims: tuple[int, ...]) -> str:
    job = build("ddp")
    train(job, 0, 2, rank)
    if rank in victims:
        kill_at(point, root)
    store.save(root, 2, job.state, attempt=1)
    return "saved"


def restored_step(root: Path, prints: Fingerprints) -> int:
    """The step that a restore finds, after a look that it is bitwise what was saved."""
    job = build(seed=9)
    info = store.restore(root, job.state)
    assert info is not None
    assert info.rejected == ()
    assert fingerprint(job) == prints[info.step]
    assert {path.name for path in root.iterdir()} <= {"step-00000001", "step-00000002"}
    return info.step


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_kill_at_any_point_of_a_save_leaves_the_old_checkpoint_or_the_whole_new_one(
    tmp_path: Path, saved: tuple[Path, Fingerprints], victims: tuple[int, ...]
) -> None:
    template, prints = saved
    found = []
    for point in range(1, 1000):
        root = tmp_path / str(point)
        shutil.copytree(template, root)
        ended = run_ranks(2, save_and_be_killed, root, point, victims)
        found.append(restored_step(root, prints))
        if all(each.result == "saved" for each in ended):
            break
        assert any(each.exit_code == -9 for each in ended)
    assert len(found) > (3 if victims == (1,) else 10)
    assert found[0] == 1
    assert found == sorted(found), "once it is committed, no later kill takes it away"
    assert found[-1] == 2


def save_and_break_off(rank: int, root: Path, size: int, victim: int) -> str:
    job = build("ddp")
    train(job, 0, 2, rank)
    if rank == victim:
        limit_file_size(size, kill=True)
    store.save(root, 2, job.state, attempt=1)
    return "saved"


@pytest.mark.parametrize("size", [0, 1, 700, 5000, 9000])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_checkpoint(
    tmp_path: Path, saved: tuple[Path, Fingerprints], victim: int, size: int
) -> None:
    template, prints = saved
    root = tmp_path / "checkpoints"
    shutil.copytree(template, root)
    ended = run_ranks(2, save_and_break_off, root, size, victim)
    assert ended[victim].exit_code < 0
    assert restored_step(root, prints) == 1


def fail_then_go_on(rank: int, root: Path, victim: int) -> Any:
    """A save that fails on one rank for want of room for its file; then two more steps and another save."""
    job = build("ddp")
    train(job, 0, 2, rank)
    before = fingerprint(job)
    if rank == victim:
        limit_file_size(6000, kill=False)
    with pytest.raises(StorageError) as caught:
        store.save(root, 2, job.state, attempt=1)
    assert fingerprint(job) == before
    left = sorted(path.name for path in root.iterdir())
    train(job, 2, 4, rank)
    if rank == victim:
        limit_file_size(1 << 30, kill=False)
    store.save(root, 4, job.state, attempt=1)
    return str(caught.value), left, fingerprint(job)


def go_on(rank: int) -> Any:
    job = build("ddp")
    train(job, 0, 4, rank)
    return fingerprint(job)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_for_all_and_training_goes_on(
    tmp_path: Path, saved: tuple[Path, Fingerprints], victim: int
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(saved[0], root)
    first, second = results(run_ranks(2, fail_then_go_on, root, victim))
    message, left, _ = first
    assert first[:2] == second[:2]
    assert f"rank {victim}: OSError: [Errno 27] File too large" in message
    assert f"rank {1 - victim}" not in message
    assert "Instead: raise the limit on file sizes" in message
    assert left == ["step-00000001"]
    assert [each[2] for each in (first, second)] == results(run_ranks(2, go_on))
    latest, rejected = latest_verified(root, quick=False)
    assert latest is not None
    assert (latest.step, rejected) == (4, [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=128k", "dthpc-test"]
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill_the_disk(rank: int, disk: Path) -> Any:
    root = disk / "checkpoints"
    job = build("ddp")
    said = []
    for step in (1, 2, 3, 4):
        train(job, step - 1, step, rank)
        try:
            store.save(root, step, job.state, attempt=0)
        except StorageError as error:
            said.append((step, str(error), sorted(path.name for path in root.iterdir())))
    return said


def test_a_full_disk_is_told_on_every_rank_and_leaves_nothing_half_made(small_disk: Path) -> None:
    first, second = results(run_ranks(2, fill_the_disk, small_disk))
    assert first == second
    assert first
    saved_steps = sorted({1, 2, 3, 4} - {step for step, _, _ in first})
    assert saved_steps
    for _, message, left in first:
        assert "No space left on device" in message
        assert "Instead: free some space" in message
        assert left == [f"step-{step:08d}" for step in saved_steps]
    info = store.restore(small_disk / "checkpoints", build(seed=3).state)
    assert info is not None
    assert (info.step, info.rejected) == (saved_steps[-1], ())


def save_under_a_file(rank: int, root: Path) -> Any:
    with pytest.raises(CheckpointError) as caught:
        store.save(root / "file" / "checkpoints", 1, build("ddp").state, attempt=0)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = results(run_ranks(2, save_under_a_file, tmp_path))
    assert first == second
    assert "NotADirectoryError" in first
