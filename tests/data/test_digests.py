"""Digests are remembered for unchanged files and for those only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dthpc.data.digests import DigestStore
from dthpc.data.files import TextFile
from dthpc.errors import UserError


def listed(path: Path) -> TextFile:
    return TextFile.at(path, path.name)


def test_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    file = listed(path)
    (first,) = DigestStore(tmp_path / "digests", settled_s=0).of([file], "listing")
    path.unlink()
    # Reading it again would fail.
    assert DigestStore(tmp_path / "digests", settled_s=0).of([file], "listing") == [first]
    with pytest.raises(UserError, match="cannot be read"):
        DigestStore(tmp_path / "digests", settled_s=0).of([file], "other listing")


def test_changed_file_has_another_digest(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("one")
    other.write_text("one")
    store = DigestStore(tmp_path / "digests", settled_s=0)
    first, second = store.of([listed(path), listed(other)], "listing")
    assert first == second
    path.write_text("two")
    changed, same = store.of([listed(path), listed(other)], "listing")
    assert changed != first
    assert same == second


def test_young_file_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    store = DigestStore(tmp_path / "digests")
    before = store.of([TextFile.at(path, "a.txt")], "listing")
    status = path.stat()
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.of([TextFile.at(path, "a.txt")], "listing") != before


def test_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    in_the_way = tmp_path / "digests"
    in_the_way.write_text("a file where the folder should be")
    file = TextFile.at(path, "a.txt")
    assert DigestStore(in_the_way).of([file], "x") == DigestStore(tmp_path / "good").of([file], "x")


def test_damaged_memory_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    file = TextFile.at(path, "a.txt")
    store = DigestStore(tmp_path / "digests")
    first = store.of([file], "listing")
    (memory,) = (tmp_path / "digests").glob("*.json")
    memory.write_text('{"a.txt": [')
    assert store.of([file], "listing") == first
