"""The few collective verbs that a checkpoint needs; they also work for one process by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

from dthpc.checkpoint.errors import CheckpointError, PeerFailure, StorageError, os_error_within, remedy
from dthpc.errors import UserError, UserErrors

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    """What became of one rank's part."""

    value: Any = None
    user_error: UserError | None = None
    text: str | None = None
    errno: int | None = None
    secondary: bool = False

    @property
    def failed(self) -> bool:
        return self.text is not None


class Ranks:
    """The ranks of a process group that save or load one state together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a group, or the default one where torch.distributed is initialised, or this process alone."""
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank; either each gets its own result, or all raise the same error.

        Args:
            what: the act, for the message, such as `writing step 100`.
            work: this rank's part.

        Raises:
            UserError: some rank raised one.
            StorageError: some rank failed for want of space or permission.
            CheckpointError: some rank failed for another reason.
        """
        outcome = _attempt(work)
        _raise_failures(what, self.gather(replace(outcome, value=None)))
        return cast(T, outcome.value)

    def collect(self, what: str, work: Callable[[], T]) -> list[T]:
        """The same, and every rank gets the results of all ranks, in their order."""
        outcomes = self.gather(_attempt(work))
        _raise_failures(what, outcomes)
        return [outcome.value for outcome in outcomes]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do something on rank 0 and give every rank its result, or its error."""
        outcome = _attempt(work) if self.rank == 0 else _Outcome()
        if not self.alone:
            box = [outcome]
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(box, src=source, group=self.group)
            outcome = box[0]
        _raise_failures(what, [outcome])
        return cast(T, outcome.value)

    def distinct(self, value: Any) -> list[tuple[int, Any]]:
        """The different JSON values among the ranks, each with the first rank that holds it, in order.

        Thousands of ranks mostly hold the same description of the state: only digests and what differs travel.
        """
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        digests = self.gather(digest)
        firsts = sorted({digests.index(each) for each in digests})
        if len(firsts) == 1:
            return [(0, value)]
        values = self.gather(value if self.rank in firsts else None)
        return [(rank, values[rank]) for rank in firsts]


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(value=work())
    except UserError as error:
        return _Outcome(user_error=_portable(error), text=str(error))
    except PeerFailure as error:
        return _Outcome(text=str(error), secondary=True)
    except Exception as error:
        system = os_error_within(error)
        text = f"{type(system or error).__name__}: {system or error}"
        return _Outcome(text=text, errno=system.errno if system else None)


def _portable(error: UserError) -> UserError:
    """The same error with its values as text: what cannot be pickled must not keep it from the other ranks."""
    if isinstance(error, UserErrors):
        return UserErrors([_portable(each) for each in error.errors])
    value = None if error.value is None else str(error.value)
    return UserError(error.why, key=error.key, value=value, instead=error.instead)


def _raise_failures(what: str, outcomes: list[_Outcome]) -> None:
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.failed}
    if not failures:
        return
    for outcome in failures.values():
        if outcome.user_error is not None:
            raise outcome.user_error
    primary = {rank: outcome for rank, outcome in failures.items() if not outcome.secondary} or failures
    shown = "; ".join(f"rank {rank}: {outcome.text}" for rank, outcome in list(primary.items())[:4])
    more = f"; and {len(primary) - 4} more ranks" if len(primary) > 4 else ""
    for outcome in primary.values():
        instead = remedy(outcome.errno)
        if instead is not None:
            raise StorageError(f"{what} failed: {shown}{more}", instead=instead)
    raise CheckpointError(f"{what} failed: {shown}{more}")
