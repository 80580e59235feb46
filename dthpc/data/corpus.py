"""Text sources: which files make up the corpus, how they become documents, and where each falls in the split.

Nothing here imports torch or numpy, so that a login node can check a source before anything is submitted.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from dthpc.data.digests import DigestStore, short_digest
from dthpc.data.files import SOURCE_KEY, TextFile, unreadable, walk
from dthpc.data.reading import LONGEST_PIECE, check_beginning, is_json_lines, is_text, records, text_pieces
from dthpc.errors import UserError

logger = logging.getLogger(__name__)

READING_RULE = 1
"""Part of every fingerprint: to be raised when the same files are read into other documents or positions."""

FEWEST_FILES = 20
"""With fewer text files than this the split is made by blocks, since a whole file would be too coarse a share."""

BLOCKS = 512
SMALLEST_BLOCK = 1 << 10
CHECKED_FILES = 8
SMALLEST_LIBRARY = 1_000_000

PLAIN_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml"}
RECORD_SUFFIXES = {".jsonl", ".ndjson", ".csv", ".tsv", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql"}
SCRIPT_SUFFIXES = {".py", ".pyi", ".js", ".ts", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".sh", ".bash", ".tcl"}
CODE_SUFFIXES = {".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala"}
OTHER_SUFFIXES = {
    ".m",
    ".f",
    ".f90",
    ".f95",
    ".hs",
    ".ml",
    ".lisp",
    ".el",
    ".clj",
    ".swift",
    ".cs",
    ".v",
    ".vhd",
    ".asm",
}
TEXT_SUFFIXES = frozenset(PLAIN_SUFFIXES | RECORD_SUFFIXES | SCRIPT_SUFFIXES | CODE_SUFFIXES | OTHER_SUFFIXES)


class Piece(NamedTuple):
    """A stretch of text of one document; the stretches of a document follow one another."""

    document: str
    """Name of the document, different from that of the one before."""

    position: float
    """Where this stretch falls in [0, 1): below the held-out fraction it is held out, else it is trained on."""

    text: bytes
    """UTF-8 text, not empty, at most about a MiB except for a longer JSON record."""


class Snapshot(Protocol):
    """What a source holds at one time."""

    @property
    def fingerprint(self) -> str:
        """Stands for the content, the order and the positions of all pieces."""

    def pieces(self) -> Iterator[Piece]:
        """The text, in the same order every time."""

    def describe(self) -> dict[str, Any]:
        """Facts for people and records, as plain JSON values."""


class TextSource(Protocol):
    """What a `data.source` must offer; a user's own class plugs in by `_target_`."""

    def check(self) -> list[UserError]:
        """Mistakes that can be seen cheaply, without reading the corpus."""

    def snapshot(self, digests: DigestStore) -> Snapshot:
        """The content as it is now.

        Raises:
            UserError: there is nothing to read, or it cannot be read.
        """


@dataclass(frozen=True)
class FileSnapshot:
    """The files of a source at one time, read into documents."""

    files: Sequence[TextFile]
    """Not empty, in the order of their names."""

    digests: Sequence[str]
    """Content digest of each file."""

    about: dict[str, Any]
    """What `describe` tells besides the counts."""

    text_field: str = "text"
    """Field of a JSON record that holds its text."""

    skip_undecodable: bool = False
    """Pass over files that are not UTF-8 text instead of refusing them."""

    warnings: list[str] = field(default_factory=list)
    """What a reader of the results should know about this source."""

    @property
    def block(self) -> int | None:
        """Bytes of the blocks that are split on, or `None` where whole files are."""
        texts = [file for file in self.files if not is_json_lines(file.name)]
        if not texts or len(texts) >= FEWEST_FILES:
            return None
        share = sum(file.size for file in texts) // BLOCKS
        return min(max(1 << max(share.bit_length() - 1, 0), SMALLEST_BLOCK), LONGEST_PIECE)

    @property
    def fingerprint(self) -> str:
        rule = json.dumps([READING_RULE, self.text_field, self.skip_undecodable, self.block])
        names = (file.name for file in self.files)
        return short_digest(rule, *itertools.chain.from_iterable(zip(names, self.digests, strict=True)))

    def pieces(self) -> Iterator[Piece]:
        """The text of all files.

        Raises:
            UserError: a file cannot be read, is not text, or changed since it was listed.
        """
        block = self.block
        for file in self.files:
            if is_json_lines(file.name):
                yield from self._records(file)
            elif not self.skip_undecodable or is_text(file):
                yield from _text(file, block)
            file.require_unchanged()

    def describe(self) -> dict[str, Any]:
        text = "block" if self.block else "file"
        kinds = {"record" if is_json_lines(file.name) else text for file in self.files}
        return {
            **self.about,
            "files": len(self.files),
            "bytes_on_disk": sum(file.size for file in self.files),
            "split_by": " and ".join(sorted(kinds)),
            "warnings": list(self.warnings),
        }

    def _records(self, file: TextFile) -> Iterator[Piece]:
        for number, text in records(file, self.text_field):
            # By content, so that a record that occurs twice is never trained on and held out as well.
            yield Piece(f"{file.name}:{number}", _position(text), text)


def _text(file: TextFile, block: int | None) -> Iterator[Piece]:
    whole = _position(os.fsencode(file.name))
    for number, text in enumerate(text_pieces(file, block or LONGEST_PIECE)):
        position = _position(os.fsencode(f"{file.name}#{number}")) if block else whole
        yield Piece(file.name, position, text)


def _position(name: bytes) -> float:
    # 53 bits, so that the fraction is exact and below 1.
    return (int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 11) / (1 << 53)


def check_fraction(value: Any) -> list[UserError]:
    """What is wrong with `data.valid_fraction`, the share of the text that is held out."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 < value < 1:
        return []
    why = "out of range" if is_number else "is no number"
    return [UserError(why, key="data.valid_fraction", value=value, instead="between 0 and 1, such as 0.05")]


class TextFiles:
    """The text files of a folder and its subfolders, one file, or all that match a glob.

    `.jsonl` and `.ndjson` files hold one document a line, any other file is one document; `.gz` of either is unpacked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str | Sequence[str] | None = None,
        text_field: str = "text",
    ) -> None:
        """Describe the source; nothing is read yet, and a path that is none is told by `check` and `snapshot`.

        Args:
            path: folder, file or glob (`**` for any depth); `~` is expanded.
            pattern: file name pattern(s) such as `*.txt`, or `books/*` on the path below the folder, for the files of a
                folder; by default all with the suffix of a common text or source code format.
            text_field: field of a JSON record that holds its text.
        """
        self._mistake = _find_mistake(path)
        self.path = Path() if self._mistake else Path(os.path.abspath(Path(path).expanduser()))
        self.patterns = None if pattern is None else [pattern] if isinstance(pattern, str) else list(pattern)
        self.text_field = text_field

    def check(self) -> list[UserError]:
        """Whether there is something to read, and whether the first files begin like text.

        Returns:
            At most one error for each of the first few files, or one for the path as a whole.
        """
        errors: list[UserError] = []
        try:
            filled = list(itertools.islice((file for file in self._list() if file.size), CHECKED_FILES))
        except UserError as error:
            return [error]
        if not filled:
            return [self._nothing()]
        for file in filled:
            try:
                check_beginning(file, self.text_field)
            except UserError as error:
                errors.append(error)
        return errors

    def snapshot(self, digests: DigestStore) -> FileSnapshot:
        """The files as they are now; empty ones are left out.

        Raises:
            UserError: there is none, or one cannot be read.
        """
        files = sorted((file for file in self._list() if file.size), key=lambda file: os.fsencode(file.name))
        if not files:
            raise self._nothing()
        listing = json.dumps(["TextFiles", str(self.path), self.patterns])
        about = {"kind": "text files", "path": str(self.path)}
        return FileSnapshot(files, digests.of(files, listing), about, text_field=self.text_field)

    def _list(self) -> Iterator[TextFile]:
        if self._mistake is not None:
            raise self._mistake
        if self.path.is_dir():
            yield from walk(self.path, self._wanted)
            return
        try:
            yield TextFile.at(self.path, self.path.name)
        except OSError as error:
            if not glob.has_magic(str(self.path)):
                raise self._missing(error) from error
            yield from self._matches()

    def _matches(self) -> Iterator[TextFile]:
        plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), self.path.parts))
        root = Path(*plain)
        for match in glob.iglob(str(self.path), recursive=True):  # noqa: PTH207 - Path.glob takes no absolute one
            path = Path(match)
            if path.is_file():
                try:
                    yield TextFile.at(path, path.relative_to(root).as_posix())
                except OSError as error:
                    raise unreadable(path, error) from error

    def _wanted(self, name: str) -> bool:
        if self.patterns is None:
            return PurePosixPath(name.removesuffix(".gz")).suffix.lower() in TEXT_SUFFIXES
        base = name.rpartition("/")[2]
        return any(fnmatch.fnmatch(base, one) or fnmatch.fnmatch(name, one) for one in self.patterns)

    def _missing(self, error: OSError) -> UserError:
        if isinstance(error, FileNotFoundError):
            hint = "the path of an existing file or folder, or a glob that matches some"
            return UserError("there is no such file or folder", key=SOURCE_KEY, value=self.path, instead=hint)
        return unreadable(self.path, error)

    def _nothing(self) -> UserError:
        if self.path.is_dir():
            chosen = "of a known text format" if self.patterns is None else f"matching {', '.join(self.patterns)}"
            why, instead = (
                f"the folder holds no file {chosen} that is not empty",
                "a folder of text, or data.source.pattern",
            )
        elif self.path.exists():
            why, instead = "the file is empty", "a file with text in it"
        else:
            why, instead = (
                "the glob matches no file that is not empty",
                "a glob that matches some; quote it in the shell",
            )
        return UserError(why, key=SOURCE_KEY, value=self.path, instead=instead)


def _find_mistake(path: object) -> UserError | None:
    """What makes a value no path at all; whether something lies there is another question."""
    instead = "one folder, file or glob; . for the current folder"
    if not isinstance(path, str | os.PathLike):
        return UserError("is no text", key=SOURCE_KEY, value=path, instead=instead)
    text = str(path)
    if not text.strip():
        return UserError("is empty", key=SOURCE_KEY, value=repr(text), instead=instead)
    if "\0" in text:
        return UserError("holds a NUL character", key=SOURCE_KEY, value=repr(text), instead=instead)
    try:
        Path(text).expanduser()
    except RuntimeError as error:
        return UserError(f"there is no such home folder ({error})", key=SOURCE_KEY, value=text, instead=instead)
    return None


class StandardLibrary:
    """The source files of Python's own standard library, a real text that every machine has.

    Tests, caches and files that depend on how Python was built are left out, so that the same Python release gives the
    same text everywhere. Where the library's sources are stripped, those of the installed packages take their place,
    with a warning.
    """

    SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Describe the source; nothing is read yet.

        Args:
            folder: the library's folder, by default that of the running Python.
        """
        paths = sysconfig.get_paths()
        self.folder = Path(folder if folder is not None else paths["stdlib"])
        self.packages = [Path(path) for path in dict.fromkeys((paths["purelib"], paths["platlib"]))]

    def check(self) -> list[UserError]:
        """Whether there is enough text, in the library or in the packages that can stand in for it."""
        try:
            self._choose()
        except UserError as error:
            return [error]
        return []

    def snapshot(self, digests: DigestStore) -> FileSnapshot:
        """The files as they are now.

        Raises:
            UserError: there is too little text in the library and in the installed packages.
        """
        root, warning = self._choose()
        files = sorted((file for file in self._list(root) if file.size), key=lambda file: os.fsencode(file.name))
        warnings = [] if warning is None else [warning]
        for text in warnings:
            logger.warning("%s", text)
        about = {
            "kind": "Python standard library" if not warnings else "installed Python packages",
            "path": str(root),
        }
        found = digests.of(files, json.dumps(["StandardLibrary", str(root)]))
        return FileSnapshot(files, found, about, skip_undecodable=True, warnings=warnings)

    def _choose(self) -> tuple[Path, str | None]:
        if self._is_enough(self.folder):
            return self.folder, None
        for root in self.packages:
            if self._is_enough(root):
                return root, (
                    f"the sources of Python's standard library are stripped from {self.folder}: the text is taken from"
                    f" the packages installed in {root} instead, so losses do not compare with those of other machines"
                )
        raise UserError(
            f"Python's standard library has less than {SMALLEST_LIBRARY / 1e6:.0f} MB of source files here, and so"
            " have the installed packages",
            key="data.source",
            value=self.folder,
            instead="data=text data.source.path=FOLDER with text of your own",
        )

    def _is_enough(self, root: Path) -> bool:
        size = 0
        for file in self._list(root):
            size += file.size
            if size >= SMALLEST_LIBRARY:
                return True
        return False

    def _list(self, root: Path) -> Iterator[TextFile]:
        if not root.is_dir():
            return iter(())
        return walk(root, _is_portable_source, self.SKIPPED_FOLDERS)


def _is_portable_source(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.endswith(".py") and base != "sitecustomize.py" and not base.startswith("_sysconfigdata")
