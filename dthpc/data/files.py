"""Finding the files of a text source: each with a stable name and what tells whether it has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dthpc.errors import UserError

SOURCE_KEY = "data.source.path"


@dataclass(frozen=True)
class TextFile:
    """One file of a source, as it was when it was listed."""

    path: Path
    """Where it lies on this machine."""

    name: str
    """Its path below the source's root, with `/`: the same on every machine and in every folder."""

    size: int
    """Size on disk, in bytes."""

    identity: tuple[int, int, int, int]
    """Size, modification time, change time (both ns) and inode: any change of the content changes one of them."""

    @classmethod
    def at(cls, path: Path, name: str, status: os.stat_result | None = None) -> TextFile:
        """Describe the file at a path, with its `stat` result if that is at hand."""
        status = status or path.stat()
        return cls(path, name, status.st_size, _identity(status))

    def require_unchanged(self) -> None:
        """Raise `UserError` if the file is no longer the one that was listed."""
        try:
            now: tuple[int, int, int, int] | None = _identity(self.path.stat())
        except OSError:
            now = None
        if now != self.identity:
            raise UserError(
                "the file changed while it was being read",
                key=SOURCE_KEY,
                value=self.path,
                instead="start again when nothing writes to it any more",
            )


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def walk(root: Path, wanted: Callable[[str], bool], skipped_folders: Collection[str] = ()) -> Iterator[TextFile]:
    """The regular files below a folder, in no particular order.

    Links to folders are followed unless they lead back to a folder above them; hidden files and folders are passed
    over.

    Args:
        root: the folder.
        wanted: tells from a file's name below the root whether it belongs to the source.
        skipped_folders: names of folders that are not entered, at any depth.

    Raises:
        UserError: a folder cannot be read.
    """
    stack: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(str(root), "", frozenset())]
    while stack:
        folder, prefix, above = stack.pop()
        try:
            status = Path(folder).stat()
            here = (status.st_dev, status.st_ino)
            if here in above:
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    name = prefix + entry.name
                    if entry.is_dir():
                        if entry.name not in skipped_folders:
                            stack.append((entry.path, name + "/", above | {here}))
                    elif wanted(name) and entry.is_file():
                        yield TextFile.at(Path(entry.path), name, entry.stat())
        except OSError as error:
            raise unreadable(Path(folder), error) from error


def unreadable(path: Path, error: Exception) -> UserError:
    """The error of a file or folder that cannot be read, with the system's reason."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(
        f"cannot be read ({reason})", key=SOURCE_KEY, value=path, instead="a readable file or folder of text"
    )
