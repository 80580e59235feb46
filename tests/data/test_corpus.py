"""Sources: what they find, how they split it, and what they refuse."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dthpc.data.corpus import FEWEST_FILES, FileSnapshot, Piece, StandardLibrary, TextFiles, check_fraction
from dthpc.data.digests import DigestStore
from dthpc.errors import UserError


def snapshot(source: TextFiles | StandardLibrary, tmp_path: Path) -> FileSnapshot:
    return source.snapshot(DigestStore(tmp_path / "digests"))


def documents(pieces: list[Piece]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for piece in pieces:
        found[piece.document] = found.get(piece.document, b"") + piece.text
    return found


def many_files(folder: Path, count: int = FEWEST_FILES) -> Path:
    for number in range(count):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}\n" * (number + 1))
    return folder


def refusal(source: TextFiles | StandardLibrary, tmp_path: Path) -> UserError:
    """The error of reading a source to its end."""
    with pytest.raises(UserError) as caught:
        list(snapshot(source, tmp_path).pieces())
    return caught.value


def test_login_node_imports_nothing_heavy() -> None:
    code = "import sys, dthpc.data.corpus; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_standard_library_holds_sources_but_no_tests(tmp_path: Path) -> None:
    source = StandardLibrary()
    assert source.check() == []
    found = snapshot(source, tmp_path)
    names = {file.name for file in found.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(part in {"test", "tests", "site-packages"} for name in names for part in name.split("/"))
    assert not any("_sysconfigdata" in name for name in names)
    assert found.describe()["split_by"] == "file"
    assert found.warnings == []


def test_stripped_library_falls_back_to_installed_packages_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "packages").mkdir()
    for name in "abc":
        (tmp_path / "packages" / f"{name}.py").write_text(f"{name} = 1\n" * 80_000)
    source = StandardLibrary(tmp_path / "lib")
    source.packages = [tmp_path / "packages"]
    assert source.check() == []
    found = snapshot(source, tmp_path)
    assert str(tmp_path / "lib") in found.describe()["warnings"][0]
    assert "stripped" in caplog.text
    assert len(found.files) == 3


def test_nothing_to_fall_back_to_is_refused(tmp_path: Path) -> None:
    source = StandardLibrary(tmp_path)
    source.packages = [tmp_path / "absent"]
    (error,) = source.check()
    assert "data.source.path=FOLDER" in error.message()


def test_folder_is_read_recursively_by_suffix(tmp_path: Path) -> None:
    root = many_files(tmp_path / "corpus")
    (root / "image.png").write_bytes(b"\x89PNG\0")
    (root / ".git").mkdir()
    (root / ".git" / "config.txt").write_text("hidden")
    (root / "packed.md.gz").write_bytes(gzip.compress(b"zipped\n"))
    found = documents(list(snapshot(TextFiles(root), tmp_path).pieces()))
    assert len(found) == FEWEST_FILES + 1
    assert found["part1/4.txt"] == b"text 4\n" * 5
    assert found["packed.md.gz"] == b"zipped\n"


def test_pattern_and_glob_choose_files(tmp_path: Path) -> None:
    root = many_files(tmp_path / "corpus")
    by_folder = snapshot(TextFiles(root, pattern="part1/*"), tmp_path)
    by_glob = snapshot(TextFiles(f"{root}/part1/*.txt"), tmp_path)
    assert [file.path for file in by_folder.files] == [file.path for file in by_glob.files]
    assert len(by_folder.files) == 7


def test_linked_folders_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    data = many_files(tmp_path / "elsewhere", 3)
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "linked").symlink_to(data)
    (data / "back").symlink_to(root)
    names = [file.name for file in snapshot(TextFiles(root), tmp_path).files]
    assert names == ["linked/part0/0.txt", "linked/part1/1.txt", "linked/part2/2.txt"]


def test_split_and_fingerprint_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    here = many_files(tmp_path / "here")
    there = tmp_path / "deep" / "there"
    shutil.copytree(here, there)
    first, second = snapshot(TextFiles(here), tmp_path), snapshot(TextFiles(there), tmp_path)
    assert first.fingerprint == second.fingerprint
    assert list(first.pieces()) == list(second.pieces())


def test_position_of_a_file_is_frozen_and_outlives_changes_of_others(tmp_path: Path) -> None:
    root = many_files(tmp_path / "corpus", 40)
    before = {piece.document: piece.position for piece in snapshot(TextFiles(root), tmp_path).pieces()}
    (root / "part0" / "0.txt").unlink()
    (root / "aaa.txt").write_text("new")
    after = {piece.document: piece.position for piece in snapshot(TextFiles(root), tmp_path).pieces()}
    assert {name: after[name] for name in before if name in after} == {
        name: position for name, position in before.items() if name != "part0/0.txt"
    }
    assert before["part1/1.txt"] == 0.46525190474530953


def test_one_large_file_is_split_by_blocks_that_end_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = b"".join(b"line %d of the book\n" % number for number in range(50_000))
    path.write_bytes(text)
    found = snapshot(TextFiles(path), tmp_path)
    pieces = list(found.pieces())
    assert b"".join(piece.text for piece in pieces) == text
    assert {piece.document for piece in pieces} == {"book.txt"}
    assert all(piece.text.endswith(b"\n") for piece in pieces)
    held_out = sum(len(piece.text) for piece in pieces if piece.position < 0.2)
    assert 0.1 < held_out / len(text) < 0.3
    assert found.describe()["split_by"] == "block"


def test_endless_lines_are_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    text = "añ→🙂" * 200_000
    path.write_text(text, encoding="utf-8")
    pieces = list(snapshot(TextFiles(path), tmp_path).pieces())
    assert len(pieces) > 100
    assert "".join(piece.text.decode() for piece in pieces) == text


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert [piece.text for piece in snapshot(TextFiles(path), tmp_path).pieces()] == [b"hello\n"]


def write_records(path: Path, records: list[object]) -> Path:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_each_record_is_a_document(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, [{"body": f"número {number}"} for number in range(5)] + [{"body": ""}])
    found = documents(list(snapshot(TextFiles(path, text_field="body"), tmp_path).pieces()))
    assert list(found.values()) == [f"número {number}".encode() for number in range(5)]


def test_equal_records_fall_on_the_same_side(tmp_path: Path) -> None:
    path = write_records(tmp_path / "data.jsonl", [{"text": "same"}, {"text": "other"}, {"text": "same"}])
    first, second, third = snapshot(TextFiles(path), tmp_path).pieces()
    assert first.position == third.position != second.position
    assert first.document != third.document


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', "no field 'text'. Instead: data.source.text_field=NAME; did you mean txt?"),
        ('{"text": 3}', "the field 'text' is not a string"),
        ("[1]", "no JSON object"),
        ('{"text": "torn', "no JSON"),
    ],
)
def test_bad_record_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    error = refusal(TextFiles(path), tmp_path)
    assert error.message().startswith(f"data.source.path={path}:3: ")
    assert message in error.message()


def test_check_sees_a_bad_first_record(tmp_path: Path) -> None:
    path = write_records(tmp_path / "data.jsonl", [{"content": "a"}])
    (error,) = TextFiles(path).check()
    assert error.value == f"{path}:1"


@pytest.mark.parametrize("content", [b"text\n\0\n", b"caf\xe9\n", "utf-16".encode("utf-16")])
def test_binary_file_is_named(tmp_path: Path, content: bytes) -> None:
    root = many_files(tmp_path / "corpus", 3)
    (root / "bad.txt").write_bytes(content)
    source = TextFiles(root)
    for error in (refusal(source, tmp_path), *source.check()):
        assert error.message().startswith(f"data.source.path={root / 'bad.txt'}: the file is not UTF-8 text")


def test_binary_content_deep_in_a_file_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"good line\n" * 400_000 + b"\0")
    assert TextFiles(path).check() == []
    assert "offset 4000000" in refusal(TextFiles(path), tmp_path).message()


def test_missing_path_is_refused(tmp_path: Path) -> None:
    source = TextFiles(tmp_path / "nowhere")
    (error,) = source.check()
    assert error.message() == refusal(source, tmp_path).message()
    assert error.key == "data.source.path"
    assert "no such file" in error.message()


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    empty_folder, empty_files, empty_file = tmp_path / "empty", tmp_path / "files", tmp_path / "empty.txt"
    empty_folder.mkdir()
    empty_files.mkdir()
    (empty_files / "a.txt").touch()
    empty_file.touch()
    for path in (empty_folder, empty_files, empty_file, f"{tmp_path}/*.md"):
        source = TextFiles(path)
        (error,) = source.check()
        assert error.key == "data.source.path"
        assert "empty" in error.message()
        assert refusal(source, tmp_path).message() == error.message()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "data.source.path='': is empty"),
        ("  ", "data.source.path='  ': is empty"),
        (["a.txt", "b.txt"], "is no text"),
        (5, "data.source.path=5: is no text"),
        (None, "is no text"),
        ("a\0b", "NUL character"),
        ("~nobody-of-this-name/text", "no such home folder"),
    ],
)
def test_what_is_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, words: str) -> None:
    monkeypatch.chdir(many_files(tmp_path / "here"))
    source = TextFiles(path)
    (error,) = source.check()
    assert words in error.message()
    assert error.key == "data.source.path"
    assert refusal(source, tmp_path).message() == error.message()


def test_the_current_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(many_files(tmp_path / "here"))
    assert TextFiles(".").check() == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "out of range"),
        (1, "out of range"),
        (-0.1, "out of range"),
        (1.5, "out of range"),
        (float("nan"), "out of range"),
        ("0.1", "is no number"),
        (None, "is no number"),
        (True, "is no number"),
    ],
)
def test_a_fraction_outside_of_0_and_1_is_refused(value: Any, why: str) -> None:
    (error,) = check_fraction(value)
    assert (error.key, error.why) == ("data.valid_fraction", why)


@pytest.mark.parametrize("value", [1e-6, 0.05, 0.5, 0.999])
def test_a_fraction_between_0_and_1_is_taken(value: float) -> None:
    assert check_fraction(value) == []


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.txt.gz"
    path.write_bytes(gzip.compress(b"some text\n" * 1000)[:-20])
    assert str(path) in refusal(TextFiles(path), tmp_path).message()


def test_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    root = many_files(tmp_path / "corpus", 3)
    found = snapshot(TextFiles(root), tmp_path)
    with pytest.raises(UserError, match="changed while it was being read"):
        [(root / piece.document).write_text("another, longer text than before") for piece in found.pieces()]
