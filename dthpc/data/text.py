"""Text as training data: a source, a tokenizer and a window length become two map-style data sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dthpc.data.corpus import TextSource, check_fraction
from dthpc.data.pack import SHARD_TOKENS, PackedCache, PackedText, default_cache_dir
from dthpc.data.shards import PackedTokens
from dthpc.data.tokenizer import ByteTokenizer, Tokenizer
from dthpc.errors import UserError, raise_together

IGNORED = -100
"""Target that is not scored: the `ignore_index` of `torch.nn.functional.cross_entropy`."""


class TokenWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a token stream: item `i` predicts tokens [i T + 1, (i + 1) T] from tokens [i T, (i + 1) T - 1].

    Neighbouring windows share one token, which is a target of the first and an input of the second, so that every token
    of the stream but the first (an end of document) is a target exactly once. The last window is as long as the others:
    past the end its inputs are ends of documents and its targets are `IGNORED`.
    """

    def __init__(self, tokens: PackedTokens, seq_len: int, padding: int, limit: int | None = None) -> None:
        """Cut a stream into windows.

        Args:
            tokens: the stream.
            seq_len: T, inputs (and targets) of a window.
            padding: token that fills the inputs past the end.
            limit: number of targets to use from the beginning of the stream, `None` for all.
        """
        self.tokens, self.seq_len, self.padding = tokens, seq_len, padding
        self.targets = max(len(tokens) - 1, 0) if limit is None else min(limit, max(len(tokens) - 1, 0))

    def __len__(self) -> int:
        return -(-self.targets // self.seq_len)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a window, int64 `[T]` each.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        count = min(self.seq_len, self.targets - start)
        window = torch.from_numpy(self.tokens.read(start, start + count + 1).astype(np.int64))
        if count == self.seq_len:
            return window[:-1], window[1:]
        inputs = torch.full((self.seq_len,), self.padding, dtype=torch.int64)
        targets = torch.full((self.seq_len,), IGNORED, dtype=torch.int64)
        inputs[:count], targets[:count] = window[:-1], window[1:]
        return inputs, targets


class TextData:
    """Text for a language model: `train` and `valid` windows over tokens that are packed once into a cache."""

    def __init__(
        self,
        source: TextSource,
        tokenizer: Tokenizer | None = None,
        seq_len: int = 256,
        valid_fraction: float = 0.05,
        cache_dir: str | os.PathLike[str] | None = None,
        max_train_tokens: int | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        """Describe the data; nothing is read yet.

        Args:
            source: where the text comes from.
            tokenizer: text to tokens, by default `ByteTokenizer`.
            seq_len: tokens of a sample.
            valid_fraction: share of the documents that is held out, in (0, 1).
            cache_dir: folder of the packed text, by default `default_cache_dir()`.
            max_train_tokens: use only so many tokens from the beginning of the training text, `None` for all.
            shard_tokens: tokens of one file of the cache.
        """
        self.source = source
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.seq_len, self.valid_fraction, self.max_train_tokens = seq_len, valid_fraction, max_train_tokens
        self.shard_tokens = shard_tokens
        self.cache_dir = cache_dir
        self._packed: PackedText | None = None
        self._source_facts: dict[str, Any] = {}

    def check(self) -> list[UserError]:
        """Mistakes that can be seen cheaply, those of the source included."""
        wrong = [
            ("train.seq_len", self.seq_len, self.seq_len >= 1, "at least 1"),
            (
                "data.max_train_tokens",
                self.max_train_tokens,
                (self.max_train_tokens or 1) >= 1,
                "at least 1, or null",
            ),
            ("data.shard_tokens", self.shard_tokens, self.shard_tokens >= 1, "at least 1"),
        ]
        errors = check_fraction(self.valid_fraction)
        errors += [
            UserError("out of range", key=key, value=value, instead=instead)
            for key, value, good, instead in wrong
            if not good
        ]
        return errors + self.source.check()

    def prepare(self) -> None:
        """Find the packed text of the source as it is now, or pack it; from all ranks and runs at once, if need be.

        Raises:
            UserError: a parameter is out of range, the text cannot be read or split or does not fill one sample, or the
                cache cannot be written.
        """
        raise_together(self.check())
        chosen = self.cache_dir
        cache = PackedCache(default_cache_dir() if chosen is None else Path(chosen).expanduser().absolute())
        snapshot = self.source.snapshot(cache.digests)
        self._source_facts = snapshot.describe()
        self._packed = cache.get(snapshot, self.tokenizer, self.valid_fraction, self.shard_tokens)
        self._require_one_window()

    @property
    def packed(self) -> PackedText:
        """The packed text; prepared if it is not yet."""
        if self._packed is None:
            self.prepare()
        assert self._packed is not None
        return self._packed

    @property
    def train(self) -> TokenWindows:
        """Training samples."""
        return self._windows("train", self.max_train_tokens)

    @property
    def valid(self) -> TokenWindows:
        """Held-out samples."""
        return self._windows("valid", None)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Stands for all tokens of both splits; ranks with different ones would train on different text."""
        return self.packed.key

    def bigram_bits_per_byte(self) -> float:
        """What the bigram model of the training text costs on the held-out text, in bits for each byte of it."""
        return self.packed.bigram_bits_per_byte

    def bytes_per_target(self, split: str) -> float:
        """Bytes of text for each scored target of `train` or `valid`.

        A mean loss of x nats a target is x / ln 2 / bytes_per_target bits a byte; exact over the whole split, and an
        estimate over a part of it.
        """
        return self.packed.bytes_per_target(split)

    def describe(self) -> dict[str, Any]:
        """Facts for people and records: source, tokenizer, sizes, cache and warnings, as plain JSON values."""
        index = self.packed.index
        sizes = {
            split: {fact: facts[fact] for fact in ("tokens", "bytes", "documents")}
            for split, facts in index["splits"].items()
        }
        source = dict(self._source_facts)
        return {
            "warnings": source.pop("warnings", []),
            "source": source,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "splits": sizes,
            "samples": {"train": len(self.train), "valid": len(self.valid)},
            "bigram_bits_per_byte": self.bigram_bits_per_byte(),
            "fingerprint": self.fingerprint,
            "cache": str(self.packed.folder),
        }

    def _require_one_window(self) -> None:
        found = self.train.targets
        if found < self.seq_len:
            more = "more text" if self.max_train_tokens is None else "more text and a larger data.max_train_tokens"
            raise UserError(
                f"the whole training text has {found} tokens, fewer than one sample",
                key="train.seq_len",
                value=self.seq_len,
                instead=f"train.seq_len={found} or less, or {more}",
            )

    def _windows(self, split: str, limit: int | None) -> TokenWindows:
        return TokenWindows(self.packed.tokens(split), self.seq_len, self.tokenizer.end_of_document, limit)
