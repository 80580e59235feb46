"""Save and restore: the two verbs of the checkpoint room, collective over a process group.

    save     snapshot → write → verify → commit           (then `retain`, by rank 0)
    restore  list → verify → match → read → fill

Each stage is a function of its own, so that writing may later run beside the training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dthpc.checkpoint import commit as protocol
from dthpc.checkpoint.errors import CheckpointError
from dthpc.checkpoint.load import RECORDS_NAME, load
from dthpc.checkpoint.manifest import (
    Checkpoint,
    FileRecord,
    Manifest,
    ManifestError,
    Rejected,
    balance,
    checkpoint_path,
    checksum,
    list_checkpoints,
    read_manifest,
    verify_contents,
    verify_names,
)
from dthpc.checkpoint.optimizers import as_json
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.snapshot import Snapshot, snapshot
from dthpc.checkpoint.state import TrainingState
from dthpc.errors import UserError


@dataclass(frozen=True)
class SaveInfo:
    """What a save did."""

    step: int
    """The step saved."""
    path: Path
    """The committed folder."""
    seconds: float
    """Wall time of the whole save on this rank."""
    bytes: int
    """Bytes of all its files but the manifest."""
    written: bool
    """False where a checkpoint of this step was there already and verified."""


@dataclass(frozen=True)
class RestoreInfo:
    """What a restore did."""

    step: int
    """The step that training goes on from."""
    path: Path
    """The folder that was loaded."""
    meta: dict[str, Any]
    """What the caller of `save` had added."""
    rejected: tuple[Rejected, ...]
    """Newer checkpoints that were passed over, newest first, with the reasons."""
    world_size: int
    """Ranks that had written it; if they had the layout of now, each got its own random numbers back, else a new
    stream."""
    seconds: float
    """Wall time of the whole restore on this rank."""
    bytes: int
    """Bytes of all its files but the manifest."""
    notes: tuple[str, ...] = ()
    """What did not come back as it was saved, one sentence each."""


def save(
    root: Path,
    step: int,
    state: TrainingState,
    *,
    attempt: int,
    group: dist.ProcessGroup | None = None,
    meta: Mapping[str, Any] | None = None,
    guard: Callable[[], None] | None = None,
) -> SaveInfo:
    """Save the state of all ranks as the checkpoint of a step; collective, and on disk when it returns.

    Args:
        root: the folder of the run's checkpoints, seen by all ranks; made if absent.
        step: optimizer updates done.
        state: the live objects; unchanged, whatever happens.
        attempt: the number of this attempt; one attempt of a run is alive at a time.
        group: the ranks that hold the state; the default group, or this process alone, if not given.
        meta: JSON values for the manifest, rank 0's; the same in every attempt (no times, no hosts).
        guard: called by rank 0 before anything is touched and again before the commit; raises a `UserError` where this
            attempt may no longer write, as when a later one has begun.

    Raises:
        UserError: the state cannot be saved, or this step holds a checkpoint with other `meta`.
        StorageError: no space, quota or permission; nothing half-made is left, and training may go on.
        CheckpointError: another failure of some rank; the same holds.
    """
    started = time.perf_counter()
    ranks = Ranks(group)
    agreed = ranks.first("taking the meta of a checkpoint", lambda: as_json(dict(meta or {}), "meta"))
    present = _already_saved(root, step, agreed, ranks)
    if present is not None:
        seconds = time.perf_counter() - started
        return SaveInfo(step, checkpoint_path(root, step), seconds, present.total_bytes, False)
    taken = snapshot(state, step, ranks)

    def begin() -> Path:
        if guard is not None:
            guard()
        return protocol.begin(root, step, attempt)

    def commit() -> Path:
        if guard is not None:
            guard()
        return protocol.commit(partial, manifest)

    partial = ranks.first(f"preparing {root}", begin)
    try:
        files = write(taken, partial, ranks)
        manifest = Manifest(step, attempt, ranks.size, time.time(), files, taken.described, agreed)
        path = ranks.first(f"committing step {step} to {root}", commit)
    except (CheckpointError, UserError):
        ranks.first(f"removing {partial}", lambda: protocol.discard(partial))
        raise
    return SaveInfo(step, path, time.perf_counter() - started, manifest.total_bytes, True)


def write(taken: Snapshot, partial: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Write a snapshot into a private folder; collective. Returns the records of all files, each on disk."""
    from dthpc.checkpoint.dcp import write_tensors

    def own() -> dict[str, FileRecord]:
        files = write_tensors(taken.shares, partial, ranks)
        if ranks.rank == 0:
            path = partial / RECORDS_NAME
            protocol.write_synced(path, json.dumps(taken.records, indent=1).encode() + b"\n")
            files[RECORDS_NAME] = checksum(path)
        return files

    shares = ranks.collect(f"writing step {taken.step} to {partial}", own)
    return {name: record for share in shares for name, record in sorted(share.items())}


def _already_saved(root: Path, step: int, meta: dict[str, Any], ranks: Ranks) -> Manifest | None:
    """The manifest of this step's checkpoint if there is one that verifies; collective."""
    path = checkpoint_path(root, step)
    if not ranks.first(f"looking for {path}", path.exists):
        return None
    manifest, problems = verify_together(path, ranks)
    if problems or manifest is None:
        return None
    if manifest.meta != meta:
        raise UserError(
            f"it already holds a checkpoint of this step, with {manifest.meta} and not {meta}",
            key="checkpoint",
            value=path,
            instead="start another run (run.name), or move that checkpoint away",
        )
    return manifest


def restore(
    root: Path,
    state: TrainingState,
    *,
    group: dist.ProcessGroup | None = None,
    expect_meta: Mapping[str, Any] | None = None,
) -> RestoreInfo | None:
    """Fill the state from the newest checkpoint that verifies; collective.

    The files are verified by all ranks, each a share; the layout may differ from the one that wrote.

    Args:
        root: the folder of the run's checkpoints, seen by all ranks.
        state: the live objects, made as for a fresh start; filled in place.
        group: the ranks that hold the state.
        expect_meta: entries that the checkpoint's `meta` must have.

    Returns:
        What was loaded, or `None` where there is no checkpoint.

    Raises:
        UserError: the newest that verifies belongs to another model, optimizer or config (the state is untouched);
            or there are checkpoints and none of them can be loaded.
    """
    started = time.perf_counter()
    ranks = Ranks(group)
    rejected: list[Rejected] = []
    for checkpoint in ranks.first(f"listing {root}", lambda: _candidates(root)):
        manifest, problems = verify_together(checkpoint.path, ranks)
        notes: tuple[str, ...] = ()
        if manifest is not None and not problems:
            try:
                notes = load(checkpoint.path, manifest, state, expect_meta or {}, ranks)
            except CheckpointError as error:
                problems = [str(error)]
        if manifest is not None and not problems:
            seconds = time.perf_counter() - started
            return RestoreInfo(
                checkpoint.step,
                checkpoint.path,
                manifest.meta,
                tuple(rejected),
                manifest.world_size,
                seconds,
                manifest.total_bytes,
                notes,
            )
        rejected.append(Rejected(checkpoint, tuple(problems)))
    if rejected:
        reasons = "; ".join(f"{each.checkpoint.path.name}: {each.why}" for each in rejected[:3])
        raise UserError(
            f"none of the {len(rejected)} checkpoints can be loaded ({reasons})",
            key="checkpoint",
            value=root,
            instead="mend the file system, or move these folders away to start from the beginning",
        )
    return None


def _candidates(root: Path) -> list[Checkpoint]:
    protocol.sweep(root)
    return list_checkpoints(root)


def verify_together(path: Path, ranks: Ranks) -> tuple[Manifest | None, list[str]]:
    """Verify a checkpoint, every rank reading a share of its bytes; collective, the same answer on all ranks.

    Returns:
        The manifest, unless it is damaged, and the problems.
    """
    manifest, problems = ranks.first(f"reading {path}", lambda: _read_and_list(path))
    if manifest is None or problems:
        return manifest, problems
    share = balance(manifest.files, ranks.size)[ranks.rank]
    found = ranks.collect(f"verifying {path}", lambda: verify_contents(path, share))
    return manifest, [problem for part in found for problem in part]


def _read_and_list(path: Path) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return None, [str(error)]
    return manifest, verify_names(path, manifest)
