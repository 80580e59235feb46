from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dthpc.data.files import TextFile, unreadable, walk
from dthpc.errors import UserError


def names(root: Path, suffix: str = "", skipped_folders: tuple[str, ...] = ()) -> list[str]:
    return sorted(file.name for file in walk(root, lambda name: name.endswith(suffix), skipped_folders))


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    return root


def test_files_are_named_by_their_path_below_the_root(tmp_path: Path) -> None:
    root = make(tmp_path / "text", "a.txt", "deep/er/b.txt", "deep/c d.txt")
    found = sorted(walk(root, lambda name: True), key=lambda file: file.name)
    assert [file.name for file in found] == ["a.txt", "deep/c d.txt", "deep/er/b.txt"]
    assert [file.path for file in found] == [root / "a.txt", root / "deep/c d.txt", root / "deep/er/b.txt"]
    assert [file.size for file in found] == [len(file.name) for file in found]


def test_the_question_is_asked_of_whole_names_and_of_files_alone(tmp_path: Path) -> None:
    make(tmp_path, "x/a.txt", "x.txt/b.md")
    asked: list[str] = []

    def wanted(name: str) -> bool:
        asked.append(name)
        return name == "x/a.txt"

    assert [file.name for file in walk(tmp_path, wanted)] == ["x/a.txt"]
    assert sorted(asked) == ["x.txt/b.md", "x/a.txt"]


def test_hidden_and_skipped_folders_are_not_entered_at_any_depth(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", ".b.txt", ".git/c.txt", "sub/.cache/d.txt", "tests/e.txt", "sub/tests/f.txt", "sub/g.txt")
    assert names(tmp_path, ".txt", ("tests",)) == ["a.txt", "sub/g.txt"]


def test_a_file_may_be_named_like_a_skipped_folder(tmp_path: Path) -> None:
    make(tmp_path, "tests", "sub/a")
    assert names(tmp_path, skipped_folders=("tests",)) == ["sub/a", "tests"]


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "absent")
    assert names(tmp_path) == ["a.txt"]


def test_a_linked_folder_is_read_under_both_names_and_a_loop_once(tmp_path: Path) -> None:
    make(tmp_path, "real/a.txt")
    (tmp_path / "other").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "up").symlink_to(tmp_path)
    assert names(tmp_path) == ["other/a.txt", "real/a.txt"]


def test_a_linked_file_is_described_by_what_it_leads_to(tmp_path: Path) -> None:
    make(tmp_path, "elsewhere/long-name.txt", "root/b.txt")
    (tmp_path / "root" / "link.txt").symlink_to(tmp_path / "elsewhere" / "long-name.txt")
    sizes = {file.name: file.size for file in walk(tmp_path / "root", lambda name: True)}
    assert sizes == {"b.txt": len("root/b.txt"), "link.txt": len("elsewhere/long-name.txt")}


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_a_root_that_is_no_folder_is_told_with_the_systems_reason(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "x"
    if kind == "file":
        root.write_text("text")
    reason = {"absent": "No such file or directory", "file": "Not a directory"}[kind]
    with pytest.raises(UserError, match=rf"data\.source\.path={root}: cannot be read \({reason}\)"):
        list(walk(root, lambda name: True))


CHANGES = {
    "appended": lambda path: path.write_text(path.read_text() + "more"),
    "same size": lambda path: path.write_text(path.read_text().upper()),
    "replaced": lambda path: (path.with_name("new").write_text(path.read_text()), path.with_name("new").replace(path)),
    "removed": lambda path: path.unlink(),
    "a folder now": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_listed_file_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    os.utime(path, ns=(1, 1))  # whatever the clock of the file system counts in, a later write is another moment
    file = TextFile.at(path, "a.txt")
    file.require_unchanged()
    CHANGES[change](path)
    with pytest.raises(UserError, match="changed while it was being read") as caught:
        file.require_unchanged()
    assert (caught.value.key, caught.value.value) == ("data.source.path", path)


def test_a_change_that_restores_size_and_time_is_noticed_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    file = TextFile.at(path, "a.txt")
    size, modified, changed, inode = file.identity
    assert (size, inode) == (9, path.stat().st_ino)
    with pytest.raises(UserError, match="changed"):
        replace(file, identity=(size, modified, changed - 1, inode)).require_unchanged()


def test_reading_a_file_does_not_change_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    file = TextFile.at(path, "a.txt")
    path.read_text()
    file.require_unchanged()
    assert TextFile.at(path, "a.txt", path.stat()) == file


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(28, "No space left on device"), "No space left"), (EOFError("cut off"), "cut off"), (EOFError(), "EOF")],
)
def test_a_reason_is_given_whatever_the_error_knows(error: Exception, reason: str) -> None:
    assert reason in unreadable(Path("/x"), error).why


def test_the_login_path_pays_for_no_torch_here() -> None:
    code = (
        "import sys, dthpc.data.files, dthpc.data.reading; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
