"""Tensors to and from files by torch.distributed.checkpoint, which de-duplicates what several ranks hold.

What to write and to read is told to it by planners of our own, as rectangles of whole tensors: so any cut of a tensor
over ranks is read into any other. No rank ever holds more than its shares and one stored rectangle.

Imported only when something is saved or loaded: importing torch.distributed.checkpoint takes 0.7 s of a start.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dthpc.checkpoint.errors import PeerFailure, os_error_within
from dthpc.checkpoint.manifest import FileRecord, TensorRecord
from dthpc.checkpoint.planners import ReadPlanner, WritePlanner
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.shares import Share


def write_tensors(shares: Sequence[Share], folder: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Write this rank's shares into a new folder; collective.

    A rectangle that several ranks offer is written once, by the rank with the least to write. Together the ranks must
    offer every element of every tensor. Files are on disk when this returns.

    Returns:
        The files that this rank wrote (rank 0 also `.metadata`), with checksums of what was written.

    Raises:
        Exception: what went wrong on this rank.
        PeerFailure: another rank failed.
    """
    files = _ChecksummingFileSystem()
    writer = _TensorWriter(folder, files)
    try:
        with _own_failure_only(ranks):
            save(
                {},
                storage_writer=writer,
                planner=WritePlanner(shares),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )
    except Exception:
        # DCP's copy of the error has travelled between processes and lost the system's reason on the way.
        if files.failure is not None:
            raise files.failure from None
        raise
    return files.records


class _TensorWriter(FileSystemWriter):
    """Writes a rank's rectangles into one file, if it has any, and forgets each as soon as it is written: torch's own
    writer keeps the copies of all of them in host memory until the file is done."""

    def __init__(self, folder: Path, files: _ChecksummingFileSystem) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self.fs = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan says; on disk when the returned future is done, which it is."""
        written: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                for item in plan.items:
                    begin = stream.tell()
                    torch.save(_compact(planner.resolve_data(item)), cast("IO[bytes]", stream))
                    length = stream.tell() - begin
                    written.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _compact(values: Any) -> torch.Tensor:
    """A tensor in host memory, and of a storage that holds nothing else: a whole storage is saved."""
    values = values.cpu()
    alone = values.untyped_storage().nbytes() == values.nbytes
    tensor: torch.Tensor = values if alone else values.clone()
    return tensor


class TensorReader(FileSystemReader):
    """A folder of written tensors; its list of contents is read once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def record(self, name: str) -> TensorRecord | None:
        """Shape and type of a tensor, or `None` where the folder holds no such tensor."""
        saved = self.read_metadata().state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            return None
        return TensorRecord(tuple(saved.size), str(saved.properties.dtype))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the targets of a plan; each stored rectangle is read once, however many targets overlap it."""
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            files.setdefault(name, {}).setdefault(item.storage_index, []).append(item)
        for name, stored in files.items():
            with self.fs.create_stream(Path(self.path) / name, "rb") as stream:
                for index in sorted(stored, key=lambda index: int(self.storage_data[index].offset)):
                    _copy(self._load(stream, index), stored[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, stream: io.IOBase, index: MetadataIndex) -> torch.Tensor:
        piece = self._slice_file(stream, self.storage_data[index])
        loaded: torch.Tensor = torch.load(piece, map_location="cpu", weights_only=True)
        return loaded


def _copy(stored: torch.Tensor, items: list[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        values = stored
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, offset, length)
        target = planner.resolve_tensor(item)
        target.copy_(values)
        planner.commit_tensor(item, target)


def read_tensors(shares: Sequence[Share], reader: TensorReader, ranks: Ranks) -> None:
    """Fill shares in place, each rank its own; collective. Errors as in `write_tensors`."""
    with _own_failure_only(ranks):
        load(
            {},
            storage_reader=reader,
            planner=ReadPlanner(shares),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


class _ChecksummingFile(io.BufferedWriter):
    """A new file whose checksum grows as it is written, so that it need not be read again."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.hash.update(data)
        self.size += count
        return count

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        raise io.UnsupportedOperation("a checksummed file is written from its beginning to its end")


class _ChecksummingFileSystem(FileSystem):
    """DCP's file system, with a checksum of every file that it writes."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise io.UnsupportedOperation(f"{path} can only be written, not opened with mode {mode}")
        try:
            with _ChecksummingFile(Path(path)) as file:
                yield file
                self.records[Path(path).name] = FileRecord(file.size, f"sha256:{file.hash.hexdigest()}")
        except Exception as error:
            self.failure = os_error_within(error)
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


@contextmanager
def _own_failure_only(ranks: Ranks) -> Iterator[None]:
    # DCP raises every rank's failures on every rank, in an exception that `except Exception` does not catch.
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        own = error.failures.get(ranks.rank)
        if own is None:
            raise PeerFailure("another rank failed") from None
        raise own[0] from None
