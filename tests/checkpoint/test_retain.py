from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dthpc.checkpoint.commit import sweep
from dthpc.checkpoint.manifest import latest_verified, list_checkpoints
from dthpc.checkpoint.retain import retain
from dthpc.errors import UserError
from tests.checkpoint.harness import flip_bit
from tests.checkpoint.test_commit import killed_at
from tests.checkpoint.test_manifest import make


def steps(root: Path) -> list[int]:
    return [each.step for each in list_checkpoints(root)]


def test_the_newest_and_every_nth_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        make(tmp_path, step)
    removed = retain(tmp_path, 2, every=20)
    assert steps(tmp_path) == [60, 50, 40, 20]
    assert [path.name for path in removed] == ["step-00000030", "step-00000010"]
    assert [path.name for path in tmp_path.iterdir() if "trash" in path.name] == []


def test_what_does_not_verify_neither_counts_nor_goes_while_it_is_new(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    (tmp_path / "step-00000004" / ".metadata").unlink()
    (tmp_path / "step-00000001" / ".metadata").unlink()
    retain(tmp_path, 1)
    assert steps(tmp_path) == [4, 3]


def test_reading_every_file_finds_a_flipped_bit_before_the_good_one_goes(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    flip_bit(tmp_path / "step-00000002" / "__0_0.distcp", 5)
    assert retain(tmp_path, 1, quick=False) == []
    assert steps(tmp_path) == [2, 1]


def test_where_nothing_verifies_nothing_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (make(tmp_path, step) / "manifest.json").unlink()
    assert retain(tmp_path, 1) == []
    assert retain(tmp_path / "absent", 1) == []


@pytest.mark.parametrize(("keep", "every"), [(0, None), (-1, None), (1, 0)])
def test_nonsense_is_refused(tmp_path: Path, keep: int, every: int | None) -> None:
    with pytest.raises(UserError, match="1 or more"):
        retain(tmp_path, keep, every=every)


def test_a_kill_at_any_point_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    point = 1
    while True:
        root = tmp_path / str(point)
        for step in (1, 2, 3):
            make(root, step)
        was_killed = killed_at(point, root, lambda root=root: retain(root, 1))
        latest, rejected = latest_verified(root, quick=False)
        assert latest is not None
        assert (latest.step, rejected) == (3, [])
        retain(root, 1)
        sweep(root)
        assert [path.name for path in root.iterdir()] == ["step-00000003"]
        if not was_killed:
            break
        point += 1
    assert point > 5


def test_a_reader_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 1)
    done = threading.Event()
    missed = []

    def read() -> None:
        while not done.is_set():
            latest, _ = latest_verified(tmp_path, quick=False)
            if latest is None:
                missed.append(list(tmp_path.iterdir()))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 40):
        make(tmp_path, step)
        retain(tmp_path, 1)
    done.set()
    reader.join()
    assert missed == []
