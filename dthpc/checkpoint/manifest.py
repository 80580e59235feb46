"""What a committed checkpoint holds and whether it is whole: read on login nodes, so it imports no torch.

A checkpoint is a folder `step-<n>` of flat files; `manifest.json` lists every other one with its size and SHA-256,
and carries a digest of its own text, so that no flipped bit anywhere in the folder goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST_NAME = "manifest.json"

_STEP_NAME = re.compile(r"step-(\d{8,})")
_OWN_DIGEST = re.compile(rb'"digest": "sha256:([0-9a-f]{64})"')
_BLOCK = 1 << 20


class ManifestError(ValueError):
    """A manifest that cannot be trusted, and why."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file."""

    size: int
    """Bytes."""
    digest: str
    """`sha256:` and 64 hexadecimal digits, over the whole file."""


@dataclass(frozen=True)
class TensorRecord:
    """Global shape and type of one tensor of the state."""

    shape: tuple[int, ...]
    """Global shape: of the whole tensor, however it was sharded."""
    dtype: str
    """As torch prints it, such as `torch.float32`."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the state itself."""

    step: int
    """Optimizer updates done."""
    attempt: int
    """The attempt of the run that wrote it."""
    world_size: int
    """Ranks that wrote it."""
    time: float
    """When it was committed, seconds since the epoch."""
    files: dict[str, FileRecord]
    """Every file of the folder but the manifest, by name."""
    tensors: dict[str, TensorRecord]
    """Every tensor that the ranks share, by global name; not the random number states of single ranks."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the caller added: JSON values such as samples consumed, config digest, model identity."""
    format: int = FORMAT
    """Version of this layout."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def encode(self) -> bytes:
        """The text of `manifest.json`, with its own digest in it."""
        blank = json.dumps({"digest": "sha256:" + "0" * 64, **asdict(self)}, indent=1).encode() + b"\n"
        digest = hashlib.sha256(blank).hexdigest().encode()
        return blank.replace(b"0" * 64, digest, 1)

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """The manifest in a text; raises `ManifestError` where one bit of it is not as it was written."""
        found = _OWN_DIGEST.search(text)
        if found is None:
            raise ManifestError(f"{MANIFEST_NAME} is damaged: it has no digest of itself")
        start, end = found.span(1)
        if hashlib.sha256(text[:start] + b"0" * 64 + text[end:]).hexdigest().encode() != found[1]:
            raise ManifestError(f"{MANIFEST_NAME} is damaged: its text does not match its digest")
        value = json.loads(text)
        del value["digest"]
        if value.get("format") != FORMAT:
            raise ManifestError(f"{MANIFEST_NAME} has format {value.get('format')}, this version reads {FORMAT}")
        value["files"] = {name: FileRecord(**record) for name, record in value["files"].items()}
        value["tensors"] = {
            name: TensorRecord(tuple(record["shape"]), record["dtype"]) for name, record in value["tensors"].items()
        }
        return cls(**value)


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint folder, verified or not."""

    step: int
    """The step in its name."""
    path: Path
    """The folder."""


@dataclass(frozen=True)
class Rejected:
    """A committed checkpoint that must not be loaded."""

    checkpoint: Checkpoint
    """Which one."""
    problems: tuple[str, ...]
    """What is wrong with it, one clause each."""

    @property
    def why(self) -> str:
        """The problems on one line, at most three of them spelled out."""
        shown = "; ".join(self.problems[:3])
        return shown if len(self.problems) <= 3 else f"{shown}; and {len(self.problems) - 3} more"


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies under `root`."""
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """The committed checkpoints under `root`, newest first; none where the folder is absent."""
    try:
        names = [path.name for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [match for match in map(_STEP_NAME.fullmatch, names) if match]
    found = [Checkpoint(int(match[1]), root / match[0]) for match in matches]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder; raises `ManifestError` where it is absent or damaged."""
    try:
        manifest = Manifest.decode((path / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise ManifestError(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from error
    if checkpoint_path(path.parent, manifest.step).name != path.name.partition(".")[0]:
        raise ManifestError(f"{MANIFEST_NAME} is of step {manifest.step}")
    return manifest


def checksum(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, read in blocks; raises `OSError`."""
    digest = hashlib.sha256()
    size = 0
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileRecord(size, f"sha256:{digest.hexdigest()}")


def verify_names(path: Path, manifest: Manifest) -> list[str]:
    """Problems seen in the folder's list of files: missing, unlisted or of another size."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    except OSError as error:
        return [f"the folder cannot be read: {error.strerror}"]
    problems = [f"{name} is missing" for name in sorted(manifest.files.keys() - sizes.keys())]
    for name in sorted(sizes.keys() - manifest.files.keys() - {MANIFEST_NAME}):
        # NFS keeps a deleted file that is still open under such a name.
        if not name.startswith(".nfs"):
            problems.append(f"{name} is not in the manifest")
    for name, record in manifest.files.items():
        if name in sizes and sizes[name] != record.size:
            problems.append(f"{name} has {sizes[name]} bytes, {record.size} were written")
    return problems


def verify_contents(path: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Problems seen by reading some files whole and comparing their checksums."""
    problems = []
    for name, record in files.items():
        try:
            if checksum(path / name) != record:
                problems.append(f"{name} does not match its checksum")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


def verify(path: Path, quick: bool = False) -> list[str]:
    """What is wrong with a checkpoint folder; an empty list means that it is as it was committed.

    Args:
        path: the folder.
        quick: look only at the manifest and at the names and sizes of the files, and read none of them.
    """
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return [str(error)]
    problems = verify_names(path, manifest)
    return problems if quick or problems else verify_contents(path, manifest.files)


def latest_verified(root: Path, quick: bool = True) -> tuple[Checkpoint | None, list[Rejected]]:
    """The newest checkpoint under `root` that verifies, and every newer one with the reasons against it."""
    rejected: list[Rejected] = []
    for checkpoint in list_checkpoints(root):
        problems = verify(checkpoint.path, quick)
        if not problems:
            return checkpoint, rejected
        if not os.path.lexists(checkpoint.path):
            # Retention took it away while it was being read; then there is a newer one.
            return latest_verified(root, quick)
        rejected.append(Rejected(checkpoint, tuple(problems)))
    return None, rejected


def balance(files: Mapping[str, FileRecord], shares: int) -> list[dict[str, FileRecord]]:
    """Files in `shares` parts of about equal bytes, the same on every caller."""
    parts: list[dict[str, FileRecord]] = [{} for _ in range(shares)]
    loads = [0] * shares
    largest_first: Iterable[str] = sorted(files, key=lambda name: (-files[name].size, name))
    for name in largest_first:
        lightest = loads.index(min(loads))
        parts[lightest][name] = files[name]
        loads[lightest] += files[name].size
    return parts
