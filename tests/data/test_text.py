"""Text as windows: every held-out byte is scored once, and the units come out right."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch.utils.data import DataLoader

from dthpc.data.corpus import StandardLibrary, TextFiles
from dthpc.data.text import IGNORED, TextData, TokenWindows
from dthpc.errors import UserError, UserErrors


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(40):
        (root / f"{number}.txt").write_text(f"document {number} says: " + "é→" * number + "\n")
    return root


def data_of(corpus: Path, **options: object) -> TextData:
    defaults = {"seq_len": 16, "valid_fraction": 0.3, "cache_dir": corpus.parent / "cache", "shard_tokens": 100}
    data = TextData(TextFiles(corpus), **{**defaults, **options})  # type: ignore[arg-type]
    data.prepare()
    return data


def scored(windows: TokenWindows) -> list[int]:
    targets = torch.cat([windows[index][1] for index in range(len(windows))])
    return targets[targets != IGNORED].tolist()


def documents(stream: list[int]) -> list[bytes]:
    assert stream[-1] == 256
    return bytes(255 if token == 256 else token for token in stream[:-1]).split(b"\xff")


@pytest.mark.parametrize("seq_len", [1, 16, 37, 10_000])
def test_every_byte_is_a_target_exactly_once(corpus: Path, seq_len: int) -> None:
    packed = data_of(corpus).packed
    train, valid = (TokenWindows(packed.tokens(split), seq_len, 256) for split in ("train", "valid"))
    found = documents(scored(train)) + documents(scored(valid))
    assert sorted(found) == sorted(path.read_bytes() for path in corpus.iterdir())


def test_inputs_are_the_tokens_before_the_targets(corpus: Path) -> None:
    windows = data_of(corpus).valid
    previous = 256
    for index in range(len(windows)):
        inputs, targets = windows[index]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (16,)
        count = int((targets != IGNORED).sum())
        assert inputs[:count].tolist() == [previous, *targets[: count - 1].tolist()]
        assert inputs[count:].tolist() == [256] * (16 - count)
        previous = int(targets[count - 1])


def test_window_that_does_not_exist_is_an_index_error(corpus: Path) -> None:
    windows = data_of(corpus).valid
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


def test_uniform_model_costs_its_bits(corpus: Path) -> None:
    data = data_of(corpus)
    targets = scored(data.valid)
    mean_nats = math.log(257)
    bits = mean_nats / math.log(2) / data.bytes_per_target("valid")
    held_out_bytes = sum(target != 256 for target in targets)
    assert bits == pytest.approx(len(targets) * math.log2(257) / held_out_bytes)


def test_training_text_can_be_limited(corpus: Path) -> None:
    whole, limited = data_of(corpus), data_of(corpus, max_train_tokens=50)
    assert scored(limited.train) == scored(whole.train)[:50]
    assert len(limited.train) == 4
    assert scored(limited.valid) == scored(whole.valid)
    assert limited.fingerprint == whole.fingerprint


def test_a_sample_longer_than_the_training_text_is_refused(corpus: Path) -> None:
    count = data_of(corpus).train.targets
    assert len(data_of(corpus, seq_len=count).train) == 1
    with pytest.raises(UserError) as caught:
        data_of(corpus, seq_len=count + 1)
    assert (caught.value.key, caught.value.value) == ("train.seq_len", count + 1)
    assert f"has {count} tokens" in caught.value.why
    with pytest.raises(UserError, match=r"has 50 tokens.*a larger data\.max_train_tokens"):
        data_of(corpus, max_train_tokens=50, seq_len=51)


def test_windows_travel_to_worker_processes(corpus: Path) -> None:
    windows = data_of(corpus).train
    windows[0]
    assert len(pickle.dumps(windows)) < 4000
    batches = list(DataLoader(windows, batch_size=4, num_workers=1))
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), torch.stack([pair[0] for pair in windows]))


def test_hydra_builds_it_from_nested_targets(corpus: Path) -> None:
    config = {
        "_target_": "dthpc.data.TextData",
        "source": {"_target_": "dthpc.data.corpus.TextFiles", "path": str(corpus)},
        "tokenizer": {"_target_": "dthpc.data.tokenizer.ByteTokenizer"},
        "cache_dir": str(corpus.parent / "cache"),
    }
    data = instantiate(config)
    assert data.vocab_size == 257
    assert len(data.valid) > 0


def test_package_does_not_import_torch_until_asked() -> None:
    code = "import sys, dthpc.data; print('torch' in sys.modules, 'numpy' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "False"]


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    data = TextData(TextFiles(tmp_path / "absent"), seq_len=0, valid_fraction=1.0)
    with pytest.raises(UserErrors) as caught:
        data.prepare()
    assert [error.key for error in caught.value.errors] == ["data.valid_fraction", "train.seq_len", "data.source.path"]


def test_description_is_plain_json_with_the_counts(corpus: Path) -> None:
    data = data_of(corpus)
    facts = json.loads(json.dumps(data.describe()))
    sizes = facts["splits"]
    assert sizes["train"]["documents"] + sizes["valid"]["documents"] == 40
    assert sizes["train"]["bytes"] + sizes["valid"]["bytes"] == facts["source"]["bytes_on_disk"]
    assert facts["samples"] == {"train": len(data.train), "valid": len(data.valid)}
    assert facts["warnings"] == []
    assert facts["bigram_bits_per_byte"] == data.bigram_bits_per_byte()


def test_standard_library_end_to_end(tmp_path: Path) -> None:
    data = TextData(StandardLibrary(), cache_dir=tmp_path)
    data.prepare()
    sizes = data.describe()["splits"]
    share = sizes["valid"]["bytes"] / (sizes["train"]["bytes"] + sizes["valid"]["bytes"])
    assert 0.01 < share < 0.15
    assert 3.0 < data.bigram_bits_per_byte() < 4.5
    assert data.packed.damaged(checksums=True) == []
