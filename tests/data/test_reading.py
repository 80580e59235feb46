from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dthpc.data.files import TextFile
from dthpc.data.reading import check_beginning, is_json_lines, is_text, records, text_pieces
from dthpc.errors import UserError

BOM = b"\xef\xbb\xbf"


def file_of(folder: Path, content: bytes, name: str = "a.txt") -> TextFile:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return TextFile.at(path, name)


def lines_of(folder: Path, *values: object, name: str = "a.jsonl") -> TextFile:
    return file_of(folder, "".join(json.dumps(value) + "\n" for value in values).encode(), name)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("size", [1, 5, 64, 1 << 20])
def test_pieces_end_at_lines_and_add_up_to_the_text(tmp_path: Path, name: str, size: int) -> None:
    text = "".join(f"line {number}: {'ä' * (number % 7)}\n" for number in range(50)).encode() + b"no newline"
    pieces = list(text_pieces(file_of(tmp_path, text, name), size))
    assert b"".join(pieces) == text
    if size > 20:
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])
        assert all(size <= len(piece) <= size + 64 for piece in pieces[:-1])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_endless_lines_are_cut_between_characters_and_stay_small(tmp_path: Path, size: int) -> None:
    text = "aé€𝄞" * 40
    pieces = list(text_pieces(file_of(tmp_path, text.encode()), size))
    assert "".join(piece.decode() for piece in pieces) == text
    assert max(map(len, pieces)) <= 2 * size + 3


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_byte_order_mark_goes_at_the_beginning_alone(tmp_path: Path, name: str) -> None:
    assert list(text_pieces(file_of(tmp_path, BOM + b"one\n" + BOM + b"two\n", name), 4)) == [
        b"one\n",
        BOM + b"two\n",
    ]
    assert list(text_pieces(file_of(tmp_path, BOM, name))) == []


def test_an_empty_file_has_no_pieces_and_is_text(tmp_path: Path) -> None:
    empty = file_of(tmp_path, b"")
    assert list(text_pieces(empty)) == []
    assert is_text(empty)
    check_beginning(empty, "text")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"good\n\xff\n", "byte 0xff at offset 5"),
        (b"good\n" * 20 + b"ba\0d", "NUL byte at offset 102"),
        (b"good\n" * 20 + "ü".encode()[:1], "byte 0xc3 at offset 100"),
        (BOM + b"a\xc0", "byte 0xc0 at offset 4"),
    ],
)
def test_what_is_no_text_is_named_with_its_offset_in_the_file(tmp_path: Path, content: bytes, where: str) -> None:
    file = file_of(tmp_path, content)
    with pytest.raises(UserError, match=where) as caught:
        list(text_pieces(file, 8))
    assert (caught.value.key, caught.value.value) == ("data.source.path", file.path)
    assert not is_text(file)


def test_what_lies_before_the_damage_is_still_given(tmp_path: Path) -> None:
    pieces = text_pieces(file_of(tmp_path, b"good\nfine\nb\0d\n"), 5)
    assert next(pieces) == b"good\nfine\n"
    with pytest.raises(UserError, match="NUL byte at offset 11"):
        next(pieces)


def test_damage_behind_the_beginning_is_not_looked_for_at_the_check(tmp_path: Path) -> None:
    file = file_of(tmp_path, b"good line\n" * 2000 + b"\xff")
    check_beginning(file, "text")
    assert not is_text(file)


@pytest.mark.parametrize("keep", [5, -1])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_cut_archive_is_unreadable_and_not_short(tmp_path: Path, name: str, keep: int) -> None:
    file = file_of(tmp_path, b'{"text": "one"}\n' * 100, name)
    file.path.write_bytes(file.path.read_bytes()[:keep])
    read = records(file, "text") if is_json_lines(name) else text_pieces(file)
    with pytest.raises(UserError, match=r"a\..*\.gz: cannot be read \(.*end-of-stream"):
        list(read)


def test_what_only_calls_itself_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"plain text after all")
    with pytest.raises(UserError, match="Not a gzipped file"):
        list(text_pieces(TextFile.at(path, path.name)))


def test_a_file_that_went_away_is_told(tmp_path: Path) -> None:
    plain, lines = file_of(tmp_path, b"text"), lines_of(tmp_path, {"text": "a"})
    plain.path.unlink()
    lines.path.unlink()
    for read in (text_pieces(plain), records(lines, "text")):
        with pytest.raises(UserError, match="No such file or directory"):
            next(read)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("a.jsonl", True),
        ("b/a.ndjson.gz", True),
        ("a.jsonl.gz", True),
        ("a.json", False),
        ("a.jsonl.txt", False),
        ("jsonl", False),
        ("a.gz", False),
    ],
)
def test_the_name_tells_json_lines_from_documents(name: str, answer: bool) -> None:
    assert is_json_lines(name) is answer


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz"])
def test_records_come_with_their_line_numbers_without_blanks_and_empty_texts(tmp_path: Path, name: str) -> None:
    content = b'{"text": "one"}\n\n  \n{"text": ""}\n{"id": 4, "text": "zwei\\nhalb"}\n{"text": "last"}'
    found = list(records(file_of(tmp_path, content, name), "text"))
    assert found == [(1, b"one"), (5, b"zwei\nhalb"), (6, b"last")]


def test_the_field_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    file = lines_of(tmp_path, {"title": "a", "body": "b"}, {"title": "c", "body": "d"})
    assert [text for _, text in records(file, "body")] == [b"b", b"d"]
    assert [text for _, text in records(file, "title")] == [b"a", b"c"]


def test_json_that_utf_8_cannot_hold_becomes_a_question_mark(tmp_path: Path) -> None:
    file = file_of(tmp_path, rb'{"text": "a\ud800b \u00e4 \ud834\udd1e"}', "a.jsonl")
    assert list(records(file, "text")) == [(1, "a?b ä 𝄞".encode())]


@pytest.mark.parametrize(
    ("line", "why", "instead"),
    [
        (b'{"text": "cut', "the line is no JSON", "one JSON object a line"),
        (b'["text"]', "the line is no JSON object", '{"text": "…"}'),
        (b'"text"', "the line is no JSON object", '{"text": "…"}'),
        (b'{"text": null}', "the field 'text' is not a string", "a text in every record"),
        (b'{"text": ["a"]}', "the field 'text' is not a string", "a text in every record"),
        (b'{"txt": "a"}', "the record has no field 'text'", "did you mean txt?"),
        (b"{}", "the record has no field 'text'", "data.source.text_field=NAME"),
        (b"[" * 100_000, "the line is no JSON", "one JSON object a line"),
        (b'{"text": "\xff"}', "the line is no JSON", "one JSON object a line"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: bytes, why: str, instead: str) -> None:
    file = file_of(tmp_path, b'{"text": "good"}\n\n' + line + b"\n", "a.jsonl")
    found = records(file, "text")
    assert next(found) == (1, b"good")
    with pytest.raises(UserError) as caught:
        next(found)
    assert (caught.value.key, caught.value.value) == ("data.source.path", f"{file.path}:3")
    assert caught.value.why.startswith(why)
    assert instead in str(caught.value.instead)


def test_the_check_of_json_lines_looks_at_the_first_record(tmp_path: Path) -> None:
    check_beginning(lines_of(tmp_path, {"text": "good"}, {"text": 1}), "text")
    with pytest.raises(UserError, match="no field 'body'"):
        check_beginning(lines_of(tmp_path, {"text": "good"}), "body")


def test_endless_continuation_bytes_are_no_text_and_no_endless_work(tmp_path: Path) -> None:
    assert not is_text(file_of(tmp_path, b"\x80" * (4 << 20)))
