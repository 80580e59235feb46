"""Tensors to and from files by torch.distributed.checkpoint, which shards, de-duplicates and reshards them.

Imported only when something is saved or loaded: importing torch.distributed.checkpoint takes 0.7 s of a start.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dthpc.checkpoint.errors import PeerFailure, os_error_within
from dthpc.checkpoint.manifest import FileRecord
from dthpc.checkpoint.ranks import Ranks


def write_tensors(tensors: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Write this rank's share of the tensors into a new folder; collective.

    A plain tensor that several ranks offer under one name is written once, by the rank with the least to write;
    of a DTensor each rank writes the shards that it holds. Files are on disk when this returns.

    Returns:
        The files that this rank wrote (rank 0 also `.metadata`), with checksums of what was written.

    Raises:
        Exception: what went wrong on this rank.
        PeerFailure: another rank failed.
    """
    files = _ChecksummingFileSystem()
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
    writer.fs = files
    try:
        with _own_failure_only(ranks):
            save(
                tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )
    except Exception:
        # DCP's copy of the error has travelled between processes and lost the system's reason on the way.
        if files.failure is not None:
            raise files.failure from None
        raise
    return files.records


def read_tensors(tensors: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> None:
    """Read tensors in place, each rank what its shards need; collective. Errors as in `write_tensors`."""
    with _own_failure_only(ranks):
        load(
            tensors,
            storage_reader=FileSystemReader(folder),
            planner=DefaultLoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


def saved_shape(folder: Path, name: str) -> torch.Size | None:
    """The shape of a tensor in a verified folder, or `None` where it holds no such tensor."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata.get(name)
    return saved.size if isinstance(saved, TensorStorageMetadata) else None


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
