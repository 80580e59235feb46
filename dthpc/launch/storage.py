"""Checks of the folder that holds the runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dthpc.errors import UserError
from dthpc.launch.verdicts import Verdict, error, ok, warning

_OF_ONE_NODE = frozenset(["tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs"])


def storage_verdicts(cfg: Any) -> Iterator[Verdict]:
    """Whether runs can be written where the configuration says, and whether other nodes will see them there."""
    root = Path(os.path.abspath(cfg.run.root))
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir():
        why = f"{existing} is a file" if existing != root else "is a file"
        yield error("folder", UserError(why, key="run.root", value=cfg.run.root, instead="the path of a folder"))
        return
    try:
        # Permissions do not tell of read-only mounts, quotas and kernel file systems; a nameless file does.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as found:
        why = f"nothing can be written to {existing} ({found.strerror})"
        yield error("folder", UserError(why, key="run.root", value=cfg.run.root, instead="a folder of yours"))
        return
    kind = file_system(existing)
    if cfg.cluster.kind == "local" or kind not in _OF_ONE_NODE:
        yield ok("folder", f"{root} ({kind})")
    else:
        told = f"{root} is on {kind}, which usually belongs to one machine: the job's nodes must see this very folder"
        yield warning("folder", f"{told}. If they don't, set run.root to a shared file system")


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Kind of the file system that holds a path, such as `nfs4` or `ext4`; `unknown` where it can't be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    best, found = -1, "unknown"
    resolved = path.resolve()
    for words in (line.split(" ") for line in lines):
        # The kernel writes blanks in mount points as octal escapes.
        point = Path(words[1].replace("\\040", " "))
        # Of two mounts at one point the later hides the earlier.
        if (resolved == point or point in resolved.parents) and len(point.parts) >= best:
            best, found = len(point.parts), words[2]
    return found
