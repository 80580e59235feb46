"""Files of `/sys` and `/proc`: of this machine, of a recorded directory, or of a recorded tar archive."""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from pathlib import Path
from typing import Protocol

from dthpc.placement.read.text import refuse

_ROOT = "sys/devices/system"
_INSTEAD = "record a node with `hwloc-gather-topology`, or with tar over /sys/devices, /sys/bus/pci and /sys/class"


class Tree(Protocol):
    """A file system seen from its root, read only. Paths are relative: `sys/devices/system/cpu/online`."""

    where: str

    def read(self, path: str) -> str | None:
        """The text of a file without blanks around it; None where it cannot be read."""

    def names(self, path: str) -> list[str]:
        """Names in a directory; none where it cannot be listed."""

    def target(self, path: str) -> str | None:
        """The path that a link leads to in the end; None where it is no link."""


class DirectoryTree:
    """This machine (`/`) or a recorded directory that holds `sys`."""

    def __init__(self, root: str | Path) -> None:
        self.where = str(root)
        self._root = str(root).rstrip("/")

    def read(self, path: str) -> str | None:
        try:
            # Much faster than a text file object, for thousands of small files.
            handle = os.open(f"{self._root}/{path}", os.O_RDONLY)
        except OSError:
            return None
        try:
            parts = []
            while part := os.read(handle, 65536):
                parts.append(part)
        except OSError:
            return None
        finally:
            os.close(handle)
        return _text(b"".join(parts))

    def names(self, path: str) -> list[str]:
        try:
            return os.listdir(f"{self._root}/{path}")  # noqa: PTH208 – many small directories
        except OSError:
            return []

    def target(self, path: str) -> str | None:
        try:
            link = os.readlink(f"{self._root}/{path}")  # noqa: PTH115 – as above
        except OSError:
            return None
        if link.startswith("/"):
            return link.lstrip("/")
        # One link suffices: entries of sysfs point at the device itself.
        return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


class ArchiveTree:
    """A recorded tar archive, plain or compressed, with `sys` at any depth."""

    def __init__(self, path: str | Path) -> None:
        """Read the archive's directory.

        Raises:
            UserError: the file is no archive, or holds no recording of `/sys`.
        """
        self.where = str(path)
        self._texts: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._names: dict[str, set[str]] = {}
        try:
            with tarfile.open(path) as archive:
                self._load(archive)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise refuse(self.where, f"the archive cannot be read ({error})", "", _INSTEAD) from error

    def _load(self, archive: tarfile.TarFile) -> None:
        members = archive.getmembers()
        roots = {match[1] for member in members if (match := re.match(rf"(.*?/?){_ROOT}(?:/|$)", member.name))}
        if not roots:
            raise refuse(self.where, f"the archive holds no {_ROOT}", "", _INSTEAD)
        root = min(roots, key=len)
        for member in members:
            if not member.name.startswith(root):
                continue
            path = member.name[len(root) :].strip("/")
            for _ in range(path.count("/") + 1 if path else 0):
                parent, _, name = path.rpartition("/")
                self._names.setdefault(parent, set()).add(name)
                path = parent
            path = member.name[len(root) :].strip("/")
            if member.issym():
                self._links[path] = member.linkname
            elif member.isfile():
                content = archive.extractfile(member)
                self._texts[path] = _text(content.read()) if content else ""

    def read(self, path: str) -> str | None:
        return self._texts.get(self._resolve(path))

    def names(self, path: str) -> list[str]:
        return sorted(self._names.get(self._resolve(path), ()))

    def target(self, path: str) -> str | None:
        parent, _, name = path.rpartition("/")
        place = f"{self._resolve(parent)}/{name}".lstrip("/")
        return self._resolve(place) if place in self._links else None

    def _resolve(self, path: str) -> str:
        """The path without links; the same path where one leads nowhere or in a circle."""
        for _ in range(40):
            parts = path.split("/")
            for length in range(1, len(parts) + 1):
                head = "/".join(parts[:length])
                if head in self._links:
                    target = posixpath.normpath(posixpath.join(posixpath.dirname(head), self._links[head]))
                    path = "/".join([target.lstrip("/"), *parts[length:]])
                    break
            else:
                return path
        return path


def open_tree(path: str | Path) -> Tree:
    """The tree of a directory that holds `sys` (perhaps one directory further down), or of an archive.

    Raises:
        UserError: there is no recording of `/sys`.
    """
    path = Path(path)
    if not path.is_dir():
        return ArchiveTree(path)
    for root in (path, *(entry for entry in sorted(path.iterdir()) if entry.is_dir())):
        if (root / _ROOT).is_dir():
            return DirectoryTree(root)
    raise refuse(str(path), f"the directory holds no {_ROOT}", "", _INSTEAD)


def _text(content: bytes) -> str:
    # Recordings of some kernels end their lists with a NUL.
    return content.decode(errors="replace").strip("\0 \t\r\n")
