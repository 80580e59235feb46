"""Shards: what is written is what is read, over every border."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dthpc.data.shards import PackedTokens, Shard, ShardWriter
from dthpc.data.tokenizer import ByteTokenizer
from dthpc.errors import UserError

DOCUMENTS = [b"first document\n", b"second", b"the third one is longer than a shard of ten tokens"]


def written(folder: Path, shard_tokens: int) -> tuple[PackedTokens, list[int]]:
    writer = ShardWriter(folder, "train", ByteTokenizer(), shard_tokens)
    expected = [256]
    for document in DOCUMENTS:
        writer.add(document[:4])
        writer.add(document[4:])
        writer.end_document()
        expected += [*document, 256]
    facts = writer.finish()
    assert facts["tokens"] == len(expected)
    assert facts["bytes"] == sum(map(len, DOCUMENTS))
    assert facts["documents"] == len(DOCUMENTS)
    return PackedTokens(folder, [Shard(**shard) for shard in facts["shards"]], np.dtype(np.uint16)), expected


@pytest.mark.parametrize("shard_tokens", [1, 7, 10, 75, 1000])
def test_any_range_reads_back(tmp_path: Path, shard_tokens: int) -> None:
    tokens, expected = written(tmp_path, shard_tokens)
    assert len(tokens) == len(expected)
    assert len(tokens.shards) == -(-len(expected) // shard_tokens)
    for start in range(0, len(expected), 3):
        for stop in range(start + 1, len(expected) + 2):
            assert tokens.read(start, stop).tolist() == expected[start:stop]


def test_stream_that_ends_with_a_full_shard_has_no_empty_one(tmp_path: Path) -> None:
    tokens, expected = written(tmp_path, 5)
    assert len(expected) % 5 == 0
    assert [shard.tokens for shard in tokens.shards] == [5] * (len(expected) // 5)


def test_pickle_carries_no_tokens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", ByteTokenizer(), 1 << 20)
    writer.add(b"x" * 300_000)
    shards = [Shard(**shard) for shard in writer.finish()["shards"]]
    tokens = PackedTokens(tmp_path, shards, np.dtype(np.uint16))
    first = tokens.read(0, 10)
    data = pickle.dumps(tokens)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).read(0, 10), first)


def test_damage_is_found_by_size_and_by_checksum(tmp_path: Path) -> None:
    tokens, _ = written(tmp_path, 10)
    assert tokens.damaged(checksums=True) == []
    content = bytearray((tmp_path / "train-00002.bin").read_bytes())
    content[3] ^= 1
    (tmp_path / "train-00002.bin").write_bytes(content)
    (tmp_path / "train-00004.bin").write_bytes(b"short")
    (tmp_path / "train-00005.bin").unlink()
    assert tokens.damaged() == ["train-00004.bin", "train-00005.bin"]
    assert tokens.damaged(checksums=True) == ["train-00002.bin", "train-00004.bin", "train-00005.bin"]


class Wide(ByteTokenizer):
    """Two tokens a byte, with ids that need four bytes."""

    fingerprint = "wide"
    vocab_size = 70_000
    end_of_document = 69_999

    def encode(self, text: bytes | str) -> npt.NDArray[np.int64]:  # type: ignore[override]
        assert isinstance(text, bytes)
        return np.array([part for byte in text for part in (byte, 65_536 + byte)], dtype=np.int64)


def test_large_vocabulary_is_packed_in_four_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", Wide(), 1000)
    writer.add(b"ab")
    writer.end_document()
    shards = [Shard(**shard) for shard in writer.finish()["shards"]]
    tokens = PackedTokens(tmp_path, shards, np.dtype(np.uint32))
    assert tokens.read(0, 6).tolist() == [69_999, 97, 65_633, 98, 65_634, 69_999]


class Faulty(ByteTokenizer):
    """Makes ids outside its vocabulary."""

    vocab_size = 100


def test_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", Faulty(), 1000)
    with pytest.raises(UserError, match=r"data\.tokenizer.*token ids in \[0, 100\)"):
        writer.add(b"z")
