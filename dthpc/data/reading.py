"""Reading text files in bounded pieces: plain text and JSON lines, gzipped or not, refused when they are not text."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import cast

from dthpc.data.files import SOURCE_KEY, TextFile, unreadable
from dthpc.errors import UserError, nearest

LONGEST_PIECE = 1 << 20
LONGEST_LINE_AFTER_PIECE = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_CONTINUATION_BYTES = 3
"""Bytes after the first that a character of UTF-8 has at most; a piece does not end within one."""


def is_json_lines(name: str) -> bool:
    """Whether a file's records are read from JSON lines rather than its text as one document."""
    return name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def text_pieces(file: TextFile, size: int = LONGEST_PIECE) -> Iterator[bytes]:
    """The UTF-8 text of a file in pieces that end at a line's end, or between two characters where lines are endless.

    Args:
        file: the file; its byte order mark, if any, is dropped.
        size: bytes a piece has at least (the last one excepted); it has at most twice as many and 64 KiB more.

    Raises:
        UserError: the file cannot be read or is not UTF-8 text; the message names it and the offset.
    """
    offset = 0
    try:
        with _open(file) as stream:
            while piece := stream.read(size):
                piece += stream.readline(min(size, LONGEST_LINE_AFTER_PIECE))
                for _ in range(_CONTINUATION_BYTES):
                    if not 0x80 <= _next_byte(stream) < 0xC0:
                        break
                    piece += stream.read(1)
                _require_text(file, piece, offset)
                text = piece.removeprefix(BYTE_ORDER_MARK) if offset == 0 else piece
                offset += len(piece)
                if text:
                    yield text
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(file.path, error) from error


def records(file: TextFile, field: str) -> Iterator[tuple[int, bytes]]:
    """The texts of a JSON-lines file, each with its line number from 1; blank lines and empty texts are passed over.

    Raises:
        UserError: the file cannot be read, or a line is no JSON object or lacks the field as a string; the message
            names the file and the line.
    """
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    text = _text_of(file, number, line, field)
                    if text:
                        yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(file.path, error) from error


def is_text(file: TextFile) -> bool:
    """Whether the whole of a file is UTF-8 text."""
    try:
        for _ in text_pieces(file):
            pass
    except UserError:
        return False
    return True


def check_beginning(file: TextFile, field: str) -> None:
    """Raise the `UserError` that reading a file would raise within its first piece or record."""
    if is_json_lines(file.name):
        next(records(file, field), None)
    else:
        next(text_pieces(file, 1 << 12), None)


def _open(file: TextFile) -> io.BufferedReader:
    if file.name.endswith(".gz"):
        # A gzip stream reads lines and peeks as a buffered file does.
        return cast(io.BufferedReader, gzip.open(file.path, "rb"))
    return open(file.path, "rb")


def _next_byte(stream: io.BufferedReader) -> int:
    ahead = stream.peek(1)[:1]
    return ahead[0] if ahead else 0


def _require_text(file: TextFile, piece: bytes, offset: int) -> None:
    nul = piece.find(b"\0")
    if nul >= 0:
        raise _not_text(file, f"there is a NUL byte at offset {offset + nul}")
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(file, f"byte 0x{piece[error.start]:02x} at offset {offset + error.start}") from None


def _not_text(file: TextFile, where: str) -> UserError:
    return UserError(
        f"the file is not UTF-8 text ({where})",
        key=SOURCE_KEY,
        value=file.path,
        instead="text in UTF-8; leave other files out with data.source.pattern",
    )


def _text_of(file: TextFile, number: int, line: bytes, field: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_record(file, number, f"the line is no JSON ({error})", "one JSON object a line") from None
    if not isinstance(record, dict):
        raise _bad_record(file, number, "the line is no JSON object", f'lines such as {{"{field}": "…"}}')
    text = record.get(field)
    if isinstance(text, str):
        # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes a question mark.
        return text.encode("utf-8", "replace")
    if field in record:
        raise _bad_record(file, number, f"the field {field!r} is not a string", "a text in every record")
    hint = f"data.source.text_field=NAME; {nearest(field, map(str, record))}"
    raise _bad_record(file, number, f"the record has no field {field!r}", hint)


def _bad_record(file: TextFile, number: int, why: str, instead: str) -> UserError:
    return UserError(why, key=SOURCE_KEY, value=f"{file.path}:{number}", instead=instead)
