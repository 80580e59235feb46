"""The cache of packed text: built once for each content, tokenizer and split, shared by all ranks and runs.

    CACHE/packed/<key>/index.json, train-00000.bin, …, valid-00000.bin, …

A build goes on in a private folder and appears by one rename, so that what is found under a key is whole. Builders of
the same key wait for one another where file locks work; where they do not, the later one throws its copy away.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dthpc.data.bigram import BigramCounts, bits_per_byte
from dthpc.data.corpus import Snapshot
from dthpc.data.digests import DigestStore, short_digest
from dthpc.data.locks import exclusive, try_lock
from dthpc.data.shards import PackedTokens, Shard, ShardWriter
from dthpc.data.tokenizer import Tokenizer, token_dtype
from dthpc.errors import UserError
from dthpc.rundir import read_json

logger = logging.getLogger(__name__)

FORMAT = 1
"""Part of every key: to be raised when the same input is packed into other files."""

SHARD_TOKENS = 1 << 26
SPLITS = ("train", "valid")
BUILDING = ".building-"
OWNER = "owner"
ABANDONED_AFTER_S = 24 * 3600.0
"""Age of an untouched build of another machine, whose locks cannot be asked about, after which it counts as dead."""


def default_cache_dir() -> Path:
    """`$DTHPC_CACHE`, or `dthpc` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Raises:
        UserError: there is none of them.
    """
    own = os.environ.get("DTHPC_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base).absolute() / "dthpc"
    try:
        return Path.home() / ".cache" / "dthpc"
    except RuntimeError:
        why = "there is no home folder to keep packed text in"
        raise UserError(why, key="data.cache_dir", instead="data.cache_dir=FOLDER or DTHPC_CACHE") from None


@dataclass(frozen=True)
class PackedText:
    """A finished entry of the cache."""

    folder: Path
    """Where it lies; the folder's name is its key."""

    index: dict[str, Any]
    """Content of its `index.json`."""

    @property
    def key(self) -> str:
        """Stands for the content, the tokenizer, the split rule and the format."""
        return self.folder.name

    @property
    def bigram_bits_per_byte(self) -> float:
        """Cost of the held-out text under the training text's bigram model; see `dthpc.data.bigram`."""
        return float(self.index["bigram_bits_per_byte"])

    def tokens(self, split: str) -> PackedTokens:
        """The tokens of `train` or `valid`."""
        shards = [Shard(**shard) for shard in self.index["splits"][split]["shards"]]
        return PackedTokens(self.folder, shards, np.dtype(self.index["dtype"]))

    def bytes_per_target(self, split: str) -> float:
        """Bytes of text for each token that is predicted (all but the first of a split)."""
        facts = self.index["splits"][split]
        return float(facts["bytes"]) / float(facts["tokens"] - 1)

    def damaged(self, checksums: bool = False) -> list[str]:
        """Names of shards whose size, or on request whose checksum, is wrong."""
        return [name for split in SPLITS for name in self.tokens(split).damaged(checksums)]


class PackedCache:
    """Finds packed text in a cache folder, or packs it."""

    def __init__(self, folder: Path) -> None:
        """Use a cache folder, which is made when something is to be kept in it."""
        self.folder = folder
        self.digests = DigestStore(folder / "digests")

    def get(
        self,
        snapshot: Snapshot,
        tokenizer: Tokenizer,
        valid_fraction: float,
        shard_tokens: int = SHARD_TOKENS,
    ) -> PackedText:
        """The packed text of a source, built if it is not there yet.

        Safe to be called from many processes at once, and in a cache that is read-only but already holds the text.

        Args:
            snapshot: the text.
            tokenizer: makes the tokens.
            valid_fraction: share of the documents (or blocks) that is held out, in (0, 1).
            shard_tokens: tokens of one file.

        Raises:
            UserError: the text cannot be read or split, or the cache cannot be written; nothing is left behind then.
        """
        rule = json.dumps([FORMAT, valid_fraction, shard_tokens])
        key = short_digest(rule, snapshot.fingerprint, tokenizer.fingerprint)
        folder = self.folder / "packed" / key
        with self._blamed():
            packed = open_packed(folder)
            if packed is not None:
                return packed
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(folder.with_suffix(".lock"), ready=lambda: open_packed(folder) is not None):
                if open_packed(folder) is None:
                    discard(folder)
                    _build(folder, snapshot, tokenizer, valid_fraction, shard_tokens)
            packed = open_packed(folder)
        if packed is None:
            raise UserError("what was packed vanished at once", key="data.cache_dir", value=self.folder)
        return packed

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "there is no room left for the packed text" if full else "the cache of packed text cannot be written"
            raise UserError(
                f"{why} ({error.strerror or error})",
                key="data.cache_dir",
                value=self.folder,
                instead="a writable folder with room for 3 times the text: data.cache_dir=FOLDER or DTHPC_CACHE",
            ) from error


def open_packed(folder: Path) -> PackedText | None:
    """The finished entry in a folder, or `None` where there is none or its files are not as long as they were."""
    index = read_json(folder / "index.json")
    if not isinstance(index, dict):
        return None
    packed = PackedText(folder, index)
    damaged = packed.damaged()
    if damaged:
        logger.warning("packed text in %s is damaged (%s) and not used", folder, ", ".join(damaged))
        return None
    return packed


def discard(folder: Path) -> None:
    """Remove a folder that may be half of something, if it is there; never leaves a part of it under its name."""
    aside = folder.with_name(f"{BUILDING}discarded-{secrets.token_hex(6)}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _build(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer, valid_fraction: float, shard_tokens: int) -> None:
    began = time.monotonic()
    private, owner = _begin(folder)
    try:
        index = _pack(private, snapshot, tokenizer, valid_fraction, shard_tokens)
        _write_index(private, index)
        (private / OWNER).unlink()
        _publish(private, folder)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    finally:
        os.close(owner)
    size = sum(index["splits"][split]["bytes"] for split in SPLITS)
    logger.info("packed %.1f MB of text into %s in %.1f s", size / 1e6, folder, time.monotonic() - began)


def _begin(folder: Path) -> tuple[Path, int]:
    """Make the private folder of a build and lock its owner file, which tells the living from the dead."""
    # The lock keeps others from taking a folder for dead between its making and its locking.
    with exclusive(folder.with_name(".lock")):
        remove_dead_builds(folder.parent)
        private = folder.with_name(f"{BUILDING}{folder.name[:12]}-{secrets.token_hex(6)}")
        private.mkdir()
        try:
            owner = os.open(private / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError:
            shutil.rmtree(private, ignore_errors=True)
            raise
        try:
            try_lock(owner)
            os.write(owner, _machine().encode())
        except OSError:
            os.close(owner)
            shutil.rmtree(private, ignore_errors=True)
            raise
    return private, owner


def remove_dead_builds(parent: Path) -> None:
    """Remove the private folders of builders that were killed.

    A builder of this machine is dead when its lock is free; one of another machine when it wrote nothing for a day.
    """
    for private in parent.glob(f"{BUILDING}*"):
        try:
            if _is_dead(private):
                logger.info("removing what a killed build left in %s", private)
                shutil.rmtree(private, ignore_errors=True)
        except OSError:
            # It ended by itself meanwhile, or belongs to somebody else.
            continue


def _is_dead(private: Path) -> bool:
    owner = private / OWNER
    try:
        here = owner.read_text(encoding="utf-8") == _machine()
    except FileNotFoundError:
        here = False
    if not here:
        newest = max(path.stat().st_mtime for path in (private, *private.iterdir()))
        return time.time() - newest > ABANDONED_AFTER_S
    descriptor = os.open(owner, os.O_RDWR)
    try:
        return try_lock(descriptor) is True
    finally:
        os.close(descriptor)


def _machine() -> str:
    """Stands for the running kernel, within which file locks are certain to be seen."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class _Written(NamedTuple):
    """What one pass over the text left in the private folder."""

    splits: dict[str, dict[str, Any]]
    bigrams: dict[str, BigramCounts]
    lowest: float
    highest: float


def _pack(
    folder: Path, snapshot: Snapshot, tokenizer: Tokenizer, valid_fraction: float, shard_tokens: int
) -> dict[str, Any]:
    written = _write_splits(folder, snapshot, tokenizer, valid_fraction, shard_tokens)
    if not all(facts["bytes"] for facts in written.splits.values()):
        if not written.lowest < written.highest:
            raise _too_small(snapshot, written)
        # Few documents can all fall on one side. Then the one nearest to the border changes sides.
        none_held_out = not written.splits["valid"]["bytes"]
        border = math.nextafter(written.lowest, 1.0) if none_held_out else written.highest
        for file in folder.glob("*.bin"):
            file.unlink()
        written = _write_splits(folder, snapshot, tokenizer, border, shard_tokens)
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "valid_fraction": valid_fraction,
        "source": snapshot.describe(),
        "bigram_bits_per_byte": bits_per_byte(written.bigrams["train"], written.bigrams["valid"]),
        "splits": written.splits,
    }


def _write_splits(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer, border: float, shard_tokens: int) -> _Written:
    """Stream all text into the two splits: positions below the border are held out."""
    writers = {split: ShardWriter(folder, split, tokenizer, shard_tokens) for split in SPLITS}
    lowest, highest = 1.0, 0.0
    document, current = None, None
    try:
        for piece in snapshot.pieces():
            writer = writers["valid" if piece.position < border else "train"]
            if current is not None and (current is not writer or piece.document != document):
                current.end_document()
            document, current = piece.document, writer
            lowest, highest = min(lowest, piece.position), max(highest, piece.position)
            writer.add(piece.text)
        if current is not None:
            current.end_document()
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    return _Written(splits, {split: writer.bigrams for split, writer in writers.items()}, lowest, highest)


def _too_small(snapshot: Snapshot, written: _Written) -> UserError:
    facts = snapshot.describe()
    key = "data.source.path" if "path" in facts else "data.source"
    if not any(split["bytes"] for split in written.splits.values()):
        return UserError("there is no text in it", key=key, value=facts.get("path"), instead="a source with text")
    return UserError(
        "the text cannot be split into a training and a held-out part, since it is a single document or block",
        key=key,
        value=facts.get("path"),
        instead="more documents, or a longer text",
    )


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    with open(folder / "index.json", "w", encoding="utf-8") as stream:
        json.dump(index, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def _publish(private: Path, folder: Path) -> None:
    _sync(private)
    try:
        private.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        # Another builder, whose lock was not seen here, was faster; its copy is as good.
        shutil.rmtree(private, ignore_errors=True)
        return
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
