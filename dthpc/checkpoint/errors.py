"""How a save or a load fails: the same error on every rank, with the training state as it was before."""

from __future__ import annotations

import errno

from dthpc.errors import UserError

_MENDABLE = {
    errno.ENOSPC: "free some space, lower checkpoint.keep, or move the run (run.root)",
    errno.EDQUOT: "free some of the quota, lower checkpoint.keep, or move the run (run.root)",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "make the folder writable for the user of the job, or move the run (run.root)",
    errno.EPERM: "make the folder writable for the user of the job, or move the run (run.root)",
    errno.EROFS: "move the run to a file system that is mounted writable (run.root)",
}


class CheckpointError(Exception):
    """Saving or loading failed on some rank; raised on all. A training job may go on after a failed save."""


class StorageError(CheckpointError, UserError):
    """The same, where the user can mend the cause: no space, no quota, no permission."""


class PeerFailure(Exception):
    """This rank stopped only because another one failed; it has nothing to add to that one's reason."""


def os_error_within(error: BaseException) -> OSError | None:
    """The system's error that an exception comes from: torch hides it below its own."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, OSError) and at.errno is not None:
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None


def remedy(number: int | None) -> str | None:
    """What a user can do about a system error number, or `None` where nothing is known."""
    return _MENDABLE.get(number) if number is not None else None
