"""The cache of packed text: keys, splits, sharing, kills, full disks and damage."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dthpc.data import pack
from dthpc.data.bigram import BigramCounts, bits_per_byte
from dthpc.data.corpus import Piece, TextFiles
from dthpc.data.pack import PackedCache, PackedText, default_cache_dir, open_packed, remove_dead_builds
from dthpc.data.tokenizer import ByteTokenizer
from dthpc.errors import UserError


@dataclass
class Pieces:
    """A source in memory; `midway` is called after its first piece."""

    content: list[Piece]
    fingerprint: str = "pieces"
    midway: Callable[[], object] | None = None

    def pieces(self) -> Iterator[Piece]:
        for number, piece in enumerate(self.content):
            yield piece
            if number == 0 and self.midway is not None:
                self.midway()

    def describe(self) -> dict[str, Any]:
        return {"kind": "pieces"}


ENOUGH = [Piece("a", 0.9, b"alpha\n"), Piece("b", 0.1, b"beta\n"), Piece("c", 0.8, b"gamma\n")]


def get(cache: Path, content: Pieces | None = None, fraction: float = 0.5, shard_tokens: int = 1000) -> PackedText:
    return PackedCache(cache).get(content or Pieces(ENOUGH), ByteTokenizer(), fraction, shard_tokens)


def text_of(packed: PackedText, split: str) -> list[bytes]:
    tokens = packed.tokens(split)
    stream = tokens.read(0, len(tokens)).tolist()
    assert stream[0] == stream[-1] == 256
    return bytes(255 if token == 256 else token for token in stream[1:-1]).split(b"\xff")


def left_behind(cache: Path) -> list[str]:
    """What lies in the cache besides locks."""
    return sorted(path.name for path in (cache / "packed").iterdir() if path.suffix != ".lock" and path.name != ".lock")


def test_splits_hold_their_documents_in_order(tmp_path: Path) -> None:
    packed = get(tmp_path)
    assert text_of(packed, "train") == [b"alpha\n", b"gamma\n"]
    assert text_of(packed, "valid") == [b"beta\n"]
    assert packed.bytes_per_target("valid") == 5 / 6
    assert packed.damaged(checksums=True) == []
    assert left_behind(tmp_path) == [packed.key]


def test_neighbouring_blocks_of_one_side_stay_one_document(tmp_path: Path) -> None:
    blocks = [Piece("book", position, text) for position, text in [(0.9, b"1"), (0.8, b"2"), (0.1, b"3"), (0.7, b"4")]]
    packed = get(tmp_path, Pieces(blocks))
    assert text_of(packed, "train") == [b"12", b"4"]
    assert text_of(packed, "valid") == [b"3"]


def test_baseline_is_that_of_the_packed_text(tmp_path: Path) -> None:
    packed = get(tmp_path)
    counts = []
    for split in ("train", "valid"):
        tokens = packed.tokens(split)
        counts.append(BigramCounts())
        counts[-1].add(tokens.read(1, len(tokens)))
    assert packed.bigram_bits_per_byte == bits_per_byte(*counts)


@pytest.mark.parametrize(
    ("fraction", "train", "valid"),
    [(0.01, [b"alpha\n", b"gamma\n"], [b"beta\n"]), (0.99, [b"alpha\n"], [b"beta\n", b"gamma\n"])],
)
def test_neither_side_is_ever_empty(tmp_path: Path, fraction: float, train: list[bytes], valid: list[bytes]) -> None:
    packed = get(tmp_path, fraction=fraction)
    assert text_of(packed, "train") == train
    assert text_of(packed, "valid") == valid
    assert packed.damaged(checksums=True) == []


@pytest.mark.parametrize(("content", "why"), [([ENOUGH[0]], "single document"), ([], "no text")])
def test_text_that_cannot_be_split_is_refused(tmp_path: Path, content: list[Piece], why: str) -> None:
    with pytest.raises(UserError, match=why):
        get(tmp_path, Pieces(content))
    assert left_behind(tmp_path) == []


def test_second_call_builds_and_writes_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise AssertionError("packed again")

    first = get(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert get(tmp_path, Pieces(ENOUGH, midway=fail)) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_key_follows_content_tokenizer_and_split(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        fingerprint = "other"

    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(30):
        (root / f"{number}.txt").write_text(f"text {number}\n")
    cache = PackedCache(tmp_path / "cache")

    def key(fraction: float = 0.3, tokenizer: ByteTokenizer | None = None) -> str:
        return cache.get(TextFiles(root).snapshot(cache.digests), tokenizer or ByteTokenizer(), fraction).key

    keys = [key(), key(0.4), key(tokenizer=Other())]
    (root / "3.txt").write_text("other text\n")
    keys.append(key())
    (root / "3.txt").write_text("text 3\n")
    assert len(set(keys)) == 4
    assert key() == keys[0]


def test_damaged_entry_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = get(tmp_path)
    os.truncate(packed.folder / "train-00000.bin", 3)
    assert open_packed(packed.folder) is None
    assert text_of(get(tmp_path), "train") == [b"alpha\n", b"gamma\n"]
    assert "damaged" in caplog.text
    (packed.folder / "index.json").write_text("{")
    assert text_of(get(tmp_path), "train") == [b"alpha\n", b"gamma\n"]
    assert left_behind(tmp_path) == [packed.key]


BUILDER = """
import logging, sys
from pathlib import Path
from dthpc.data.corpus import Piece
from dthpc.data.pack import PackedCache
from dthpc.data.tokenizer import ByteTokenizer

class Endless:
    fingerprint = "pieces"
    def pieces(self):
        yield Piece("a", 0.9, b"x" * 3_000_000)
        print("midway", flush=True)
        sys.stdin.readline()
        yield Piece("b", 0.1, b"y" * 3_000_000)
    def describe(self):
        return {}

logging.basicConfig(level="INFO", stream=sys.stdout)
print(PackedCache(Path(sys.argv[1])).get(Endless(), ByteTokenizer(), 0.5, 1_000_000).key, flush=True)
"""


def start(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_build_leaves_nothing_that_is_used_and_is_cleared_away(tmp_path: Path) -> None:
    victim = start(BUILDER, tmp_path)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "midway\n"
    (half,) = left_behind(tmp_path)
    assert half.startswith(pack.BUILDING)
    assert list((tmp_path / "packed" / half).glob("train-*.bin"))
    victim.kill()
    victim.communicate()
    assert left_behind(tmp_path) == [half]
    packed = get(tmp_path)
    assert text_of(packed, "valid") == [b"beta\n"]
    assert left_behind(tmp_path) == [packed.key]


def test_four_builders_at_once_build_once(tmp_path: Path) -> None:
    builders = [start(BUILDER, tmp_path) for _ in range(4)]
    for builder in builders:
        # Any of them may be the one that builds and asks for a line, while the others wait for it.
        assert builder.stdin is not None
        builder.stdin.write("\n")
        builder.stdin.flush()
    outputs = [builder.communicate()[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4
    keys = {output.splitlines()[-1] for output in outputs}
    assert len(keys) == 1
    assert sum("midway" in output for output in outputs) == 1
    assert left_behind(tmp_path) == list(keys)


def test_without_locks_the_later_builder_throws_its_copy_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    fast: list[PackedText] = []
    slow = get(tmp_path, Pieces(ENOUGH, midway=lambda: fast.append(get(tmp_path))))
    assert slow == fast[0]
    assert left_behind(tmp_path) == [slow.key]


def test_living_build_is_not_taken_for_dead(tmp_path: Path) -> None:
    other = Pieces(ENOUGH, fingerprint="other")
    packed = get(tmp_path, Pieces(ENOUGH, midway=lambda: get(tmp_path, other)))
    assert text_of(packed, "train") == [b"alpha\n", b"gamma\n"]
    assert len(left_behind(tmp_path)) == 2


def test_build_of_another_machine_is_left_alone_for_a_day(tmp_path: Path) -> None:
    young, old = tmp_path / f"{pack.BUILDING}young", tmp_path / f"{pack.BUILDING}old"
    for folder in (young, old):
        folder.mkdir()
        (folder / pack.OWNER).write_text("elsewhere")
    for path in (old / pack.OWNER, old):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    remove_dead_builds(tmp_path)
    assert young.exists()
    assert not old.exists()


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, Pieces(ENOUGH, midway=interrupt))
    assert left_behind(tmp_path) == []


FULL = """
import resource, sys
from pathlib import Path
from dthpc.data.corpus import Piece
from dthpc.data.pack import PackedCache
from dthpc.data.tokenizer import ByteTokenizer
from dthpc.errors import UserError

class Large:
    fingerprint = "large"
    def pieces(self):
        for number in range(16):
            yield Piece(str(number), number / 16, b"x" * (1 << 20))
    def describe(self):
        return {}

if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
cache = Path(sys.argv[1])
try:
    PackedCache(cache).get(Large(), ByteTokenizer(), 0.5)
except UserError as error:
    print(error)
print([p.name for p in (cache / "packed").iterdir() if not p.name.endswith(".lock")])
"""


def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    output, _ = start(FULL, tmp_path, "limit").communicate()
    error, left = output.splitlines()
    assert error.startswith(f"data.cache_dir={tmp_path}: there is no room left for the packed text")
    assert left == "[]"


def test_really_full_file_system(tmp_path: Path) -> None:
    private_mounts = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=4m none "$0" && exec "$@"',
        str(tmp_path),
    )
    if os.geteuid() != 0 or subprocess.run([*private_mounts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a small file system")
    output, _ = start(FULL, tmp_path, "mount", prefix=private_mounts).communicate()
    error, left = output.splitlines()
    assert "no room left" in error
    assert "No space left on device" in error
    assert left == "[]"


def test_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        get(tmp_path / "file" / "cache")
    assert caught.value.key == "data.cache_dir"
    assert "cannot be written" in caught.value.message()


def test_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DTHPC_CACHE", raising=False)
    assert default_cache_dir() == Path("/home/somebody/.cache/dthpc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert default_cache_dir() == Path("/scratch/cache/dthpc")
    monkeypatch.setenv("DTHPC_CACHE", "/fast")
    assert default_cache_dir() == Path("/fast")
