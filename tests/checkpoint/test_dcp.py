from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dthpc.checkpoint.dcp import _ChecksummingFile, _ChecksummingFileSystem, read_tensors, saved_shape, write_tensors
from dthpc.checkpoint.errors import PeerFailure
from dthpc.checkpoint.manifest import FileRecord, checksum
from dthpc.checkpoint.ranks import Ranks
from tests.checkpoint.harness import limit_file_size, results, run_ranks


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.weight": scale * torch.arange(12.0).reshape(3, 4),
        "model.half": (scale * torch.arange(5)).to(torch.bfloat16),
        "model.count": torch.tensor(7),
        "model.none": torch.zeros(0, 3),
        "optim.weight.exp_avg": scale * torch.linspace(0, 1, 12).reshape(3, 4),
    }


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 99) for key, value in tensors().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first.keys() | second
    )


def test_one_process_reads_back_the_bits_that_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    records = write_tensors(tensors(), folder, Ranks())
    target = empty()
    read_tensors(target, folder, Ranks())
    assert same(target, tensors())
    assert sorted(records) == sorted(path.name for path in folder.iterdir())


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    records = write_tensors(tensors(), tmp_path / "step", Ranks())
    assert records == {path.name: checksum(path) for path in (tmp_path / "step").iterdir()}
    assert ".metadata" in records


def test_reading_fills_the_very_tensors_and_asks_for_a_part_if_it_likes(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path, Ranks())
    live = torch.full((3, 4), 99.0)
    address = live.data_ptr()
    read_tensors({"model.weight": live}, tmp_path, Ranks())
    assert live.data_ptr() == address
    assert torch.equal(live, tensors()["model.weight"])


def test_shapes_are_known_without_reading_the_tensors(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path, Ranks())
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    shapes = {key: saved_shape(tmp_path, key) for key in tensors()}
    assert shapes == {key: value.shape for key, value in tensors().items()}
    assert saved_shape(tmp_path, "model.absent") is None


def test_a_tensor_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path, Ranks())
    with pytest.raises(RuntimeError, match=r"model\.other"):
        read_tensors({"model.other": torch.zeros(1)}, tmp_path, Ranks())


def test_files_of_an_earlier_save_are_not_written_over(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path, Ranks())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Exception, match="exist"):
        write_tensors(tensors(2.0), tmp_path, Ranks())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def write_and_read(rank: int, folder: Path) -> tuple[dict[str, FileRecord], bool]:
    records = write_tensors(tensors(), folder, Ranks())
    target = empty()
    read_tensors(target, folder, Ranks())
    return records, same(target, tensors())


def test_what_all_ranks_hold_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    answers = results(run_ranks(2, write_and_read, folder))
    assert [equal for _, equal in answers] == [True, True]
    assert {**answers[0][0], **answers[1][0]} == {path.name: checksum(path) for path in folder.iterdir()}
    assert not answers[0][0].keys() & answers[1][0].keys()
    size = sum(value.numel() * value.element_size() for value in tensors().values())
    written = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    alone = sum(r.size for name, r in write_tensors(tensors(), tmp_path / "alone", Ranks()).items() if name[0] != ".")
    assert size <= written <= alone


def write_shards(rank: int, folder: Path) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)
    write_tensors({"model.weight": distribute_tensor(whole, mesh, [Shard(0)])}, folder, Ranks())
    across = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    read_tensors({"model.weight": across}, folder, Ranks())
    assert torch.equal(across.full_tensor(), whole)
    return list(across.to_local().shape)


def test_shards_are_read_in_another_cut(tmp_path: Path) -> None:
    assert results(run_ranks(2, write_shards, tmp_path)) == [[7, 3], [7, 2]]
    whole = torch.zeros(7, 5)
    read_tensors({"model.weight": whole}, tmp_path, Ranks())
    assert torch.equal(whole, torch.arange(35.0).reshape(7, 5))
    assert saved_shape(tmp_path, "model.weight") == (7, 5)


def write_with_too_little_room(rank: int, folder: Path) -> Any:
    if rank == 1:
        limit_file_size(1000, kill=False)
    part = {f"rank{rank}.weight": torch.zeros(1000)}
    try:
        write_tensors(part, folder, Ranks())
    except PeerFailure:
        return "a peer failed"
    except OSError as error:
        return error.strerror
    return None


def test_the_rank_that_failed_knows_the_systems_reason_and_the_others_that_it_was_not_they(tmp_path: Path) -> None:
    assert results(run_ranks(2, write_with_too_little_room, tmp_path)) == ["a peer failed", "File too large"]


def test_a_checksum_grows_with_what_is_written(tmp_path: Path) -> None:
    with _ChecksummingFile(tmp_path / "a") as file:
        for piece in (b"one", memoryview(b"two"), bytearray(b""), b"x" * 100_000):
            assert file.write(piece) == len(piece)
    record = checksum(tmp_path / "a")
    assert (file.size, f"sha256:{file.hash.hexdigest()}") == (record.size, record.digest)


def test_what_would_make_a_checksum_wrong_is_refused(tmp_path: Path) -> None:
    with _ChecksummingFile(tmp_path / "a") as file, pytest.raises(io.UnsupportedOperation, match="from its beginning"):
        file.seek(0)
    with pytest.raises(FileExistsError):
        _ChecksummingFile(tmp_path / "a")
    files = _ChecksummingFileSystem()
    with pytest.raises(io.UnsupportedOperation, match="mode rb"), files.create_stream(tmp_path / "a", "rb"):
        pass


def test_a_renamed_file_keeps_its_checksum(tmp_path: Path) -> None:
    files = _ChecksummingFileSystem()
    with files.create_stream(tmp_path / "a.tmp", "wb") as stream:
        stream.write(b"content")
    files.rename(tmp_path / "a.tmp", tmp_path / "a")
    assert files.records == {"a": checksum(tmp_path / "a")}


def test_a_failed_file_has_no_checksum_and_its_reason_is_kept(tmp_path: Path) -> None:
    files = _ChecksummingFileSystem()
    with pytest.raises(OSError, match="No such file"), files.create_stream(tmp_path / "absent" / "a", "wb"):
        pass
    assert files.records == {}
    assert files.failure is not None
    assert os.strerror(files.failure.errno or 0) == "No such file or directory"
