"""Content digests of files, remembered so that thousands of unchanged files are not read again at every start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dthpc.data.files import TextFile, unreadable
from dthpc.data.locks import exclusive
from dthpc.rundir import read_json

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
SETTLED_S = 2.0
"""A younger file can be rewritten within one tick of its time stamps, so its digest is not remembered."""


def short_digest(*parts: str) -> str:
    """A digest of a sequence of strings, as 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class DigestStore:
    """Digests of files, kept in one JSON file for each listing of files."""

    def __init__(self, folder: Path, settled_s: float = SETTLED_S) -> None:
        """Keep the digests in a folder, which is made when there is something to keep and it can be.

        Args:
            folder: the folder.
            settled_s: age in seconds that a file must have for its digest to be remembered.
        """
        self._folder, self._settled_s = folder, settled_s

    def of(self, files: Sequence[TextFile], listing: str) -> list[str]:
        """Content digests of files, in their order.

        Only files whose identity is not remembered are read. Processes that start together leave the reading to one.

        Args:
            files: the files.
            listing: what was listed (root and selection); each listing remembers its own files.

        Raises:
            UserError: a file cannot be read, or changes meanwhile.
        """
        memory = self._folder / f"{short_digest(listing)}.json"
        known = _load(memory)
        if not all(_remembered(known, file) for file in files):
            known = self._complete(files, memory)
        return [known[file.name][1] for file in files]

    def _complete(self, files: Sequence[TextFile], memory: Path) -> dict[str, tuple[list[int], str]]:
        with contextlib.ExitStack() as held:
            # Remembering only saves time, so a cache that cannot be written to is no reason to stop here.
            with _unremembered(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(exclusive(memory.with_suffix(".lock")))
            known = _digest_missing(files, _load(memory))
            with _unremembered(self._folder):
                _store(memory, known, files, time.time() - self._settled_s)
            return known


@contextlib.contextmanager
def _unremembered(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.debug("digests of files are not remembered in %s: %s", folder, error)


def _remembered(known: dict[str, tuple[list[int], str]], file: TextFile) -> bool:
    entry = known.get(file.name)
    return entry is not None and tuple(entry[0]) == file.identity


def _digest_missing(
    files: Iterable[TextFile], known: dict[str, tuple[list[int], str]]
) -> dict[str, tuple[list[int], str]]:
    return {
        file.name: known[file.name] if _remembered(known, file) else (list(file.identity), _digest(file))
        for file in files
    }


def _digest(file: TextFile) -> str:
    state = hashlib.blake2b(digest_size=16)
    try:
        with open(file.path, "rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK):
                state.update(chunk)
    except OSError as error:
        raise unreadable(file.path, error) from error
    file.require_unchanged()
    return state.hexdigest()


def _load(memory: Path) -> dict[str, tuple[list[int], str]]:
    try:
        stored = read_json(memory)
    except OSError:
        return {}
    return stored if isinstance(stored, dict) else {}


def _store(memory: Path, known: dict[str, tuple[list[int], str]], files: Iterable[TextFile], settled: float) -> None:
    kept = {file.name: known[file.name] for file in files if max(file.identity[1:3]) < settled * 1e9}
    descriptor, partial = tempfile.mkstemp(dir=memory.parent, prefix=f".{memory.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(kept, stream, separators=(",", ":"))
        os.replace(partial, memory)
    except BaseException:
        Path(partial).unlink()
        raise
