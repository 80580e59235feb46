from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dthpc.checkpoint.commit import begin, commit, discard, partial_path, sweep, write_synced
from dthpc.checkpoint.manifest import checkpoint_path, latest_verified, verify
from tests.checkpoint.harness import flip_bit, kill_at
from tests.checkpoint.test_manifest import CONTENTS, describe, make


def killed_at(point: int, root: Path, act: Callable[[], object]) -> bool:
    """Do something in a child that is killed at a point; whether it was, or had ended before."""
    child = os.fork()
    if child == 0:
        kill_at(point, root)
        act()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_a_kill_at_any_point_of_a_save_leaves_the_old_checkpoint_or_the_whole_new_one(tmp_path: Path) -> None:
    found = set()
    point = 1
    while True:
        root = tmp_path / str(point)
        make(root, 1)
        was_killed = killed_at(point, root, lambda root=root: make(root, 2))
        latest, rejected = latest_verified(root, quick=False)
        assert latest is not None
        assert rejected == []
        found.add(latest.step)
        begin(root, 3, attempt=1)
        assert {path.name for path in root.iterdir()} <= {"step-00000001", "step-00000002", "step-00000003.partial-1"}
        if not was_killed:
            break
        point += 1
    assert point > 10
    assert found == {1, 2}


def test_a_checkpoint_that_verifies_not_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    point = 1
    while True:
        root = tmp_path / str(point)
        make(root, 1)
        flip_bit(make(root, 2) / "records.json", 0)
        was_killed = killed_at(point, root, lambda root=root: make(root, 2, attempt=1))
        latest, _ = latest_verified(root, quick=False)
        assert latest is not None
        if not was_killed:
            break
        point += 1
    assert latest.step == 2
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]


def test_what_another_rank_wrote_must_be_visible(tmp_path: Path) -> None:
    partial = begin(tmp_path, 4, attempt=0)
    for name, content in CONTENTS.items():
        write_synced(partial / name, content)
    manifest = describe(partial, 4)
    (partial / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0.distcp is missing.*file system that all nodes share"):
        commit(partial, manifest)
    assert not checkpoint_path(tmp_path, 4).exists()


def test_a_late_commit_of_a_dead_attempt_fails_once_it_was_swept(tmp_path: Path) -> None:
    zombie = begin(tmp_path, 4, attempt=0)
    for name, content in CONTENTS.items():
        write_synced(zombie / name, content)
    manifest = describe(zombie, 4)
    begin(tmp_path, 4, attempt=1)
    with pytest.raises(FileNotFoundError):
        commit(zombie, manifest)


def test_begin_sweeps_dead_attempts_and_spares_the_living_one(tmp_path: Path) -> None:
    begin(tmp_path, 1, attempt=0)
    own = begin(tmp_path, 2, attempt=1)
    (tmp_path / "step-00000007.trash-0123abcd").mkdir()
    (tmp_path / "step-notes").mkdir()
    write_synced(own / "half", b"x")
    fresh = begin(tmp_path, 3, attempt=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [own.name, fresh.name, "step-notes"]
    assert begin(tmp_path, 2, attempt=1) == own
    assert list(own.iterdir()) == []


def test_sweep_takes_every_private_folder_where_no_save_is_under_way(tmp_path: Path) -> None:
    begin(tmp_path, 2, attempt=1)
    make(tmp_path, 1, attempt=1)
    assert sweep(tmp_path) == [partial_path(tmp_path, 2, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert sweep(tmp_path / "absent") == []


def test_discard_is_content_with_a_folder_that_is_gone(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    discard(path)
    discard(path)
    assert list(tmp_path.iterdir()) == []


def test_a_committed_checkpoint_verifies(tmp_path: Path) -> None:
    assert verify(make(tmp_path, 12)) == []
