"""Packed tokens on disk: a stream of token ids cut into files of bounded size, written in order, read by memory map."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dthpc.data.bigram import END, BigramCounts
from dthpc.data.tokenizer import Tokenizer, Tokens, token_dtype
from dthpc.errors import UserError

BUFFERED_BYTES = 1 << 20
CHECKSUM_CHUNK = 1 << 22


@dataclass(frozen=True)
class Shard:
    """One file of packed tokens."""

    file: str
    """Its name in the folder of its stream."""

    tokens: int
    """Number of token ids in it."""

    crc32: int
    """`zlib.crc32` of its bytes."""


class ShardWriter:
    """Writes one split: encodes its text, cuts the tokens into shards and counts bytes, documents and bigrams.

    The stream begins with an end-of-document token, so that the first byte of the text is predicted (and scored) as
    well.
    """

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        """Write shards of a split into a folder.

        Args:
            folder: existing folder, of this writer's own.
            split: name of the split, the first part of the file names.
            tokenizer: makes the tokens.
            shard_tokens: tokens in each shard but the last.
        """
        self.bigrams = BigramCounts()
        self.bytes = self.documents = 0
        self._folder, self._split, self._tokenizer, self._shard_tokens = (
            folder,
            split,
            tokenizer,
            shard_tokens,
        )
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.end_of_document], dtype=self._dtype)
        self._shards: list[Shard] = []
        self._stream: Any = None
        self._in_shard = self._crc32 = self._buffered = 0
        self._tokens: list[Tokens] = [self._end]
        self._symbols: list[npt.NDArray[np.uint16]] = []

    def add(self, text: bytes) -> None:
        """Append text to the current document."""
        tokens = self._tokenizer.encode(text)
        self._require_valid(tokens)
        self._tokens.append(tokens.astype(self._dtype, copy=False))
        self._symbols.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
        self.bytes += len(text)
        self._buffered += len(text)
        if self._buffered >= BUFFERED_BYTES:
            self._flush()

    def end_document(self) -> None:
        """End the current document."""
        self._tokens.append(self._end)
        self._symbols.append(np.array([END], dtype=np.uint16))
        self.documents += 1
        # An array costs more than its items, so that many tiny documents must not pile up.
        self._buffered += 64

    def finish(self) -> dict[str, Any]:
        """Write what is left, sync it to disk and return the split's part of the index."""
        self._flush()
        self._end_shard()
        return {
            "tokens": sum(shard.tokens for shard in self._shards),
            "bytes": self.bytes,
            "documents": self.documents,
            "shards": [vars(shard) for shard in self._shards],
        }

    def close(self) -> None:
        """Close the open file, if any, whatever its state."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _flush(self) -> None:
        if self._symbols:
            self.bigrams.add(np.concatenate(self._symbols))
        tokens = np.concatenate(self._tokens) if self._tokens else self._end[:0]
        self._tokens, self._symbols, self._buffered = [], [], 0
        while tokens.size:
            if self._stream is None:
                name = f"{self._split}-{len(self._shards):05d}.bin"
                # Unbuffered: the pieces are large, and a full disk shows where it is met.
                self._stream = open(self._folder / name, "xb", buffering=0)  # noqa: SIM115 - closed by `close`
            part = tokens[: self._shard_tokens - self._in_shard]
            tokens = tokens[part.size :]
            self._write(part)
            if self._in_shard == self._shard_tokens:
                self._end_shard()

    def _write(self, tokens: Tokens) -> None:
        data = memoryview(tokens.tobytes())
        self._crc32 = zlib.crc32(data, self._crc32)
        self._in_shard += tokens.size
        while data:
            # A disk that is nearly full takes a part of the data before it refuses.
            data = data[self._stream.write(data) :]

    def _end_shard(self) -> None:
        if self._stream is None:
            return
        os.fsync(self._stream.fileno())
        name = Path(self._stream.name).name
        self.close()
        self._shards.append(Shard(name, self._in_shard, self._crc32))
        self._in_shard = self._crc32 = 0

    def _require_valid(self, tokens: Tokens) -> None:
        whole = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)
        if whole and (not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size):
            return
        raise UserError(
            f"encode() returned something else than token ids in [0, {self._tokenizer.vocab_size})",
            key="data.tokenizer",
            value=self._tokenizer.fingerprint,
            instead="a one-dimensional integer array of ids below vocab_size",
        )


@dataclass
class PackedTokens:
    """The tokens of one split, mapped into memory when they are first read; cheap to pickle and to send to workers."""

    folder: Path
    """Where the shards lie."""

    shards: Sequence[Shard]
    """In the order of the stream; all but the last are equally long."""

    dtype: np.dtype[np.unsignedinteger]
    """Type of the token ids."""

    _maps: dict[int, Tokens] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream, over shard borders where need be; less where the stream ends.

        Returns:
            A read-only view into one shard, or a copy of parts of several.
        """
        each = self.shards[0].tokens
        first, offset = divmod(start, each)
        if stop - start <= each - offset or first == len(self.shards) - 1:
            return self._map(first)[offset : offset + stop - start]
        last = min((stop - 1) // each, len(self.shards) - 1)
        parts = [
            self._map(number)[max(start - number * each, 0) : stop - number * each] for number in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def damaged(self, checksums: bool = False) -> list[str]:
        """Names of shards whose size, or on request whose checksum, is not the one they were written with."""
        return [shard.file for shard in self.shards if not self._is_whole(shard, checksums)]

    def _map(self, number: int) -> Tokens:
        tokens = self._maps.get(number)
        if tokens is None:
            shard = self.shards[number]
            tokens = np.memmap(self.folder / shard.file, dtype=self.dtype, mode="r", shape=(shard.tokens,))
            # A plain view: slicing a `memmap` costs several times as much.
            tokens = self._maps[number] = tokens.view(np.ndarray)
        return tokens

    def _is_whole(self, shard: Shard, checksums: bool) -> bool:
        path = self.folder / shard.file
        try:
            if path.stat().st_size != shard.tokens * self.dtype.itemsize:
                return False
            return not checksums or _crc32(path) == shard.crc32
        except OSError:
            return False


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHECKSUM_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
