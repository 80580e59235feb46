from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.checkpoint import manifest as subject
from dthpc.checkpoint.commit import begin, commit, write_synced
from dthpc.checkpoint.manifest import FileRecord, Manifest, ManifestError, TensorRecord
from tests.checkpoint.harness import flip_bit

CONTENTS = {".metadata": b"index", "__0_0.distcp": b"a" * 3000, "records.json": b"{}"}


def make(root: Path, step: int, attempt: int = 0) -> Path:
    """Commit a checkpoint of plain bytes through the real protocol."""
    partial = begin(root, step, attempt)
    for name, content in CONTENTS.items():
        write_synced(partial / name, content)
    return commit(partial, describe(partial, step, attempt))


def describe(partial: Path, step: int, attempt: int = 0) -> Manifest:
    files = {name: subject.checksum(partial / name) for name in CONTENTS}
    return Manifest(step, attempt, 1, 12.5, files, {"model.w": TensorRecord((2, 3), "torch.float32")}, {"samples": 7})


def test_a_manifest_survives_the_round_trip(tmp_path: Path) -> None:
    written = describe_of(make(tmp_path, 5))
    assert written == Manifest.decode(written.encode())
    assert written.tensors == {"model.w": TensorRecord((2, 3), "torch.float32")}
    assert written.total_bytes == sum(map(len, CONTENTS.values()))


def describe_of(path: Path) -> Manifest:
    return subject.read_manifest(path)


def test_no_bit_of_a_manifest_can_flip_unnoticed() -> None:
    text = Manifest(3, 1, 2, 0.5, {"a": FileRecord(1, "sha256:" + "0" * 64)}, {}, {"samples": 1024}).encode()
    for position in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[position] ^= 1 << bit
            with pytest.raises(ManifestError):
                Manifest.decode(bytes(damaged))


def test_a_manifest_of_a_newer_format_is_refused_by_its_number() -> None:
    with pytest.raises(ManifestError, match="format 99"):
        Manifest.decode(Manifest(1, 0, 1, 0.0, {}, {}, {}, format=99).encode())


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, 5)
    assert subject.verify(path) == []
    size = (path / name).stat().st_size
    for position in {0, size // 2, size - 1}:
        flip_bit(path / name, position, bit=position % 8)
        problems = subject.verify(path)
        assert len(problems) == 1
        assert name in problems[0]
        flip_bit(path / name, position, bit=position % 8)
    assert subject.verify(path) == []


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_missing_or_truncated_file_is_found_and_named(tmp_path: Path, name: str, quick: bool) -> None:
    path = make(tmp_path, 5)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    assert name in subject.verify(path, quick)[0]
    (path / name).unlink()
    assert name in subject.verify(path, quick)[0]


def test_a_file_that_the_manifest_does_not_list_is_found_unless_nfs_keeps_it(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    (path / ".nfs0000001").touch()
    assert subject.verify(path) == []
    (path / "__1_0.distcp").touch()
    assert subject.verify(path) == ["__1_0.distcp is not in the manifest"]


def test_a_folder_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    moved = make(tmp_path, 5).rename(tmp_path / "step-00000006")
    assert subject.verify(moved) == ["manifest.json is of step 5"]


def test_only_committed_folders_are_listed_newest_first(tmp_path: Path) -> None:
    for step in (100, 20, 123456789):
        make(tmp_path, step)
    (tmp_path / "step-00000300.partial-1").mkdir()
    (tmp_path / "step-00000400.trash-0a1b").mkdir()
    (tmp_path / "notes").mkdir()
    assert [each.step for each in subject.list_checkpoints(tmp_path)] == [123456789, 100, 20]
    assert subject.list_checkpoints(tmp_path / "absent") == []


def test_the_newest_that_verifies_is_found_and_the_others_told(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    flip_bit(tmp_path / "step-00000003" / "__0_0.distcp", 17)
    (tmp_path / "step-00000002" / ".metadata").unlink()
    quick, passed_over = subject.latest_verified(tmp_path)
    assert quick is not None
    assert (quick.step, passed_over) == (3, [])
    latest, rejected = subject.latest_verified(tmp_path, quick=False)
    assert latest == subject.Checkpoint(1, tmp_path / "step-00000001")
    assert [(each.checkpoint.step, each.why) for each in rejected] == [
        (3, "__0_0.distcp does not match its checksum"),
        (2, ".metadata is missing"),
    ]
    assert subject.latest_verified(tmp_path / "absent") == (None, [])


def test_shares_hold_every_file_once_and_about_equal_bytes() -> None:
    files = {f"f{size}": FileRecord(size, "sha256:") for size in (5, 90, 40, 45, 1, 3)}
    shares = subject.balance(files, 3)
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert max(sum(record.size for record in share.values()) for share in shares) == 90
    assert subject.balance({}, 2) == [{}, {}]


def test_a_login_node_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, dthpc.checkpoint.manifest, dthpc.checkpoint.retain; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
