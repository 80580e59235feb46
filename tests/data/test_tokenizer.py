"""The byte tokenizer."""

from __future__ import annotations

import numpy as np
import pytest

from dthpc.data.tokenizer import ByteTokenizer, token_dtype


def test_round_trip_leaves_out_ends_of_documents() -> None:
    tokenizer = ByteTokenizer()
    text = bytes(range(256)) + "año → 🙂".encode()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert len(tokens) == len(text)
    assert tokenizer.decode([256, *tokens, 256]) == text
    assert tokenizer.decode(tokenizer.encode("día")) == "día".encode()


def test_end_of_document_is_no_byte() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.end_of_document not in tokenizer.encode(bytes(range(256)))
    assert tokenizer.vocab_size == 257


@pytest.mark.parametrize("tokens", [[257], [-1]])
def test_foreign_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="byte tokenizer"):
        ByteTokenizer().decode(tokens)


def test_tokens_are_no_wider_than_they_must_be() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
