"""The commit protocol: a checkpoint is complete and verified, or it does not exist.

    step-00000100.partial-3      private to attempt 3; every rank writes and syncs its files here
    step-00000100                the same folder after one atomic rename by rank 0, once all ranks are done
    step-00000100.trash-<id>     being deleted; loadable no more

Only the middle name is ever loaded. A kill may leave the others behind; the next save or restore sweeps them.
Nothing here is collective or imports torch: rank 0 calls these functions, and `store` makes the ranks agree.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from dthpc.checkpoint.manifest import MANIFEST_NAME, Manifest, checkpoint_path, verify_names

_PARTIAL_NAME = re.compile(r"step-\d{8,}\.partial-(\d+)")
_TRASH_NAME = re.compile(r"step-\d{8,}\.trash-[0-9a-f]+")


def begin(root: Path, step: int, attempt: int) -> Path:
    """Sweep what dead attempts left and make this attempt's private folder for a step; raises `OSError`."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(root.parent)
    partial = partial_path(root, step, attempt)
    if partial.exists():
        discard(partial)
    sweep(root, keep_attempt=attempt)
    partial.mkdir()
    return partial


def partial_path(root: Path, step: int, attempt: int) -> Path:
    """Where an attempt writes the checkpoint of a step before it is committed."""
    return root / f"{checkpoint_path(root, step).name}.partial-{attempt}"


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and force it to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def commit(partial: Path, manifest: Manifest) -> Path:
    """Turn a private folder, whose files all ranks have synced, into the checkpoint of its step.

    A committed folder of this step that is still there is one that did not verify (the caller has looked): it is
    moved away, never written into.

    Returns:
        The committed folder, on disk with its name when this returns.

    Raises:
        OSError: nothing was committed.
        FileNotFoundError: a file that another rank wrote cannot be seen from here.
    """
    problems = verify_names(partial, manifest)
    if problems:
        raise FileNotFoundError(
            f"rank 0 does not see what the other ranks wrote to {partial} ({'; '.join(problems[:3])}); "
            "is the folder on a file system that all nodes share?"
        )
    write_synced(partial / MANIFEST_NAME, manifest.encode())
    sync_folder(partial)
    final = checkpoint_path(partial.parent, manifest.step)
    replaced = move_to_trash(final) if final.exists() else None
    partial.rename(final)
    sync_folder(partial.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def move_to_trash(path: Path) -> Path:
    """Make a folder unloadable by one atomic rename; its contents can then be removed at leisure."""
    trash = path.with_name(f"{path.name.partition('.')[0]}.trash-{uuid.uuid4().hex[:12]}")
    path.rename(trash)
    return trash


def discard(path: Path) -> None:
    """Remove a folder that at no instant looks like a checkpoint; what cannot be removed is swept later."""
    try:
        trash = move_to_trash(path)
    except OSError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def sweep(root: Path, keep_attempt: int | None = None) -> list[Path]:
    """Remove what kills have left under `root`: half-removed folders, and private folders of other attempts.

    Args:
        root: the folder of the checkpoints.
        keep_attempt: the attempt whose private folders are alive; `None` where no save can be under way.

    Returns:
        The folders that were removed.
    """
    swept = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        partial = _PARTIAL_NAME.fullmatch(path.name)
        if partial and (keep_attempt is None or int(partial[1]) != keep_attempt):
            discard(path)
            swept.append(path)
        elif _TRASH_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
