"""Which checkpoints stay. Torch-free, called by one process, safe against kills and concurrent readers."""

from __future__ import annotations

import shutil
from pathlib import Path

from dthpc.checkpoint.commit import move_to_trash
from dthpc.checkpoint.manifest import Checkpoint, list_checkpoints, verify
from dthpc.errors import UserError


def retain(root: Path, keep: int, *, every: int | None = None, quick: bool = True) -> list[Path]:
    """Remove old checkpoints, and never the newest one that verifies.

    Kept are the `keep` newest that verify, the verified ones whose step is a multiple of `every`, and everything
    newer than the oldest of the `keep`: a new one that does not verify may only be on a file system that is away.
    A folder is first renamed, so that no reader takes a half of it for a checkpoint, then removed.

    Args:
        root: the folder of the checkpoints.
        keep: how many to keep, at least 1.
        every: keep each checkpoint whose step it divides, for ever; `None` keeps none of them for this reason.
        quick: judge by names and sizes; otherwise read every file that might be kept.

    Returns:
        The folders that were removed, newest first.

    Raises:
        UserError: `keep` or `every` is less than 1.
        OSError: a folder could not be removed.
    """
    for name, value in (("checkpoint.keep", keep), ("checkpoint.keep_every", every)):
        if value is not None and value < 1:
            raise UserError("the newest checkpoint is always kept", key=name, value=value, instead="1 or more")
    removed = []
    for checkpoint in surplus(list_checkpoints(root), keep, every, quick):
        trash = move_to_trash(checkpoint.path)
        removed.append(checkpoint.path)
        shutil.rmtree(trash)
    return removed


def surplus(checkpoints: list[Checkpoint], keep: int, every: int | None, quick: bool) -> list[Checkpoint]:
    """Those of the checkpoints (newest first) that need not stay."""
    verified = 0
    extra = []
    for checkpoint in checkpoints:
        if verified < keep:
            verified += not verify(checkpoint.path, quick)
        elif not (every and checkpoint.step % every == 0 and not verify(checkpoint.path, quick)):
            extra.append(checkpoint)
    return extra
