from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dthpc.checkpoint.dcp import TensorReader, _ChecksummingFile, _ChecksummingFileSystem, read_tensors, write_tensors
from dthpc.checkpoint.errors import PeerFailure
from dthpc.checkpoint.manifest import FileRecord, TensorRecord, checksum
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.shares import Share, whole
from tests.checkpoint.harness import limit_file_size, results, run_ranks


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.weight": scale * torch.arange(12.0).reshape(3, 4),
        "model.half": (scale * torch.arange(5)).to(torch.bfloat16),
        "model.count": torch.tensor(7),
        "model.none": torch.zeros(0, 3),
        "optim.weight.exp_avg": scale * torch.linspace(0, 1, 12).reshape(3, 4),
    }


def wholes(named: dict[str, torch.Tensor]) -> list[Share]:
    return [whole(name, tensor) for name, tensor in named.items()]


def write(named: dict[str, torch.Tensor], folder: Path) -> dict[str, FileRecord]:
    """Write whole tensors."""
    return write_tensors(wholes(named), folder, Ranks())


def read(named: dict[str, torch.Tensor], folder: Path) -> None:
    """Read whole tensors in place."""
    read_tensors(wholes(named), TensorReader(folder), Ranks())


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 99) for key, value in tensors().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first.keys() | second
    )


def test_one_process_reads_back_the_bits_that_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    records = write(tensors(), folder)
    target = empty()
    read(target, folder)
    assert same(target, tensors())
    assert sorted(records) == sorted(path.name for path in folder.iterdir())


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    records = write(tensors(), tmp_path / "step")
    assert records == {path.name: checksum(path) for path in (tmp_path / "step").iterdir()}
    assert ".metadata" in records


def test_reading_fills_the_very_tensors_and_asks_for_a_part_if_it_likes(tmp_path: Path) -> None:
    write(tensors(), tmp_path)
    live = torch.full((3, 4), 99.0)
    address = live.data_ptr()
    read({"model.weight": live}, tmp_path)
    assert live.data_ptr() == address
    assert torch.equal(live, tensors()["model.weight"])


def test_shapes_and_types_are_known_without_reading_the_tensors(tmp_path: Path) -> None:
    write(tensors(), tmp_path)
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    reader = TensorReader(tmp_path)
    for name, tensor in tensors().items():
        expected = TensorRecord(tuple(tensor.shape), str(tensor.dtype)) if tensor.numel() else None
        assert reader.record(name) == expected
    assert reader.record("model.absent") is None


def test_a_tensor_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    write(tensors(), tmp_path)
    with pytest.raises(ValueError, match=r"model\.other was not saved"):
        read({"model.other": torch.zeros(1)}, tmp_path)


def test_files_of_an_earlier_save_are_not_written_over(tmp_path: Path) -> None:
    write(tensors(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Exception, match="exist"):
        write(tensors(2.0), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def write_and_read(rank: int, folder: Path) -> tuple[dict[str, FileRecord], bool]:
    records = write(tensors(), folder)
    target = empty()
    read(target, folder)
    return records, same(target, tensors())


def test_what_all_ranks_hold_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    answers = results(run_ranks(2, write_and_read, folder))
    assert [equal for _, equal in answers] == [True, True]
    assert {**answers[0][0], **answers[1][0]} == {path.name: checksum(path) for path in folder.iterdir()}
    assert not answers[0][0].keys() & answers[1][0].keys()
    size = sum(value.numel() * value.element_size() for value in tensors().values())
    written = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    alone = sum(r.size for name, r in write(tensors(), tmp_path / "alone").items() if name[0] != ".")
    assert size <= written <= alone


def write_columns(rank: int, folder: Path) -> list[list[float]]:
    """Write two bands of rows, and read them as two uneven bands of columns."""
    matrix = torch.arange(35.0).reshape(7, 5)
    first, last = ((0, 4), (4, 7))[rank]
    rows = Share("w", (7, 5), (first, 0), (last - first, 5), 0, (last - first) * 5, matrix[first:last])
    write_tensors([rows], folder, Ranks())
    width = (3, 2)[rank]
    columns = Share("w", (7, 5), (0, 3 * rank), (7, width), 0, 7 * width, torch.zeros(7 * width))
    read_tensors([columns], TensorReader(folder), Ranks())
    return columns.tensor.view(7, width).tolist()


def test_parts_are_read_in_another_cut(tmp_path: Path) -> None:
    matrix = torch.arange(35.0).reshape(7, 5)
    assert results(run_ranks(2, write_columns, tmp_path)) == [matrix[:, :3].tolist(), matrix[:, 3:].tolist()]
    target = torch.zeros(7, 5)
    read({"w": target}, tmp_path)
    assert torch.equal(target, matrix)


def test_a_tensor_is_stored_in_rectangles_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dthpc.checkpoint.planners._STORED_BYTES", 32)
    matrix = torch.arange(36.0).reshape(9, 4).t()
    write({"w": matrix}, tmp_path)
    reader = TensorReader(tmp_path)
    assert len(reader.read_metadata().state_dict_metadata["w"].chunks) == 8
    target = torch.zeros(4, 9)
    read({"w": target}, tmp_path)
    assert torch.equal(target, matrix)


def test_a_stored_rectangle_is_read_once_for_all_that_overlaps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.arange(36.0).reshape(6, 6)
    write({"w": matrix}, tmp_path)
    loads = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: loads.append(1) or real(*args, **options))
    piece = Share("w", (6, 6), (0, 0), (6, 6), 3, 33, torch.zeros(30))
    read_tensors([piece], TensorReader(tmp_path), Ranks())
    assert torch.equal(piece.tensor, matrix.flatten()[3:33])
    assert len(loads) == 1


def write_with_too_little_room(rank: int, folder: Path) -> Any:
    if rank == 1:
        limit_file_size(1000, kill=False)
    part = {f"rank{rank}.weight": torch.zeros(1000)}
    try:
        write(part, folder)
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
