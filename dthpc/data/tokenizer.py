"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What a `data.tokenizer` must offer; a user's own class plugs in by `_target_`.

    Long documents are encoded in pieces of about a MiB that end at a line's end.
    """

    @property
    def fingerprint(self) -> str:
        """Stands for the mapping: other text-to-token rules need another one, since packed tokens are found by it."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""

    @property
    def end_of_document(self) -> int:
        """The token id that stands before the first document and after each; `encode` never makes it."""

    def encode(self, text: bytes | str) -> Tokens:
        """Token ids of a text, one-dimensional, unsigned; bytes are UTF-8."""

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """The text of token ids; ends of documents are left out."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every token id of a vocabulary: two bytes where they do, else four."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """One token for each byte of UTF-8, and one for the end of a document."""

    fingerprint = "bytes-1"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: bytes | str) -> npt.NDArray[np.uint16]:
        """The bytes of a text as token ids, uint16."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """The bytes of token ids.

        Raises:
            ValueError: a token id is not of this vocabulary.
        """
        ids = np.asarray(tokens)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"token ids of a byte tokenizer lie in [0, {self.vocab_size})")
        return bytes(ids[ids != self.end_of_document].astype(np.uint8))
