from __future__ import annotations

import errno
from typing import Any

import pytest

from dthpc.checkpoint.errors import CheckpointError, PeerFailure, StorageError
from dthpc.checkpoint.ranks import Ranks
from dthpc.errors import UserError, UserErrors
from tests.checkpoint.harness import results, run_ranks


def raising(error: BaseException) -> Any:
    raise error


def scenes(rank: int) -> Any:
    """What each verb gives or says, when all goes well and when a rank fails."""
    ranks = Ranks()

    def said(act: Any) -> tuple[str, str]:
        with pytest.raises((CheckpointError, UserError)) as caught:
            act()
        return type(caught.value).__name__, str(caught.value)

    full = OSError(errno.ENOSPC, "No space left on device", "/scratch/x")
    unknown = UserErrors([UserError("is odd", key="a", value=lambda: 0), UserError("is even", key="b")])
    return {
        "together": ranks.together("x", lambda: rank * 10),
        "collect": ranks.collect("x", lambda: rank * 10),
        "first": ranks.first("x", lambda: f"from {rank}"),
        "distinct": ranks.distinct({"rank": rank // 2}),
        "same": ranks.distinct("same"),
        "one fails": said(lambda: ranks.together("reading", lambda: raising(ValueError("bad")) if rank == 1 else 0)),
        "full disk": said(
            lambda: ranks.collect("writing", lambda: raising(full) if rank == 2 else raising(PeerFailure()))
        ),
        "first fails": said(lambda: ranks.first("listing", lambda: raising(ValueError(f"bad {rank}")))),
        "user": said(lambda: ranks.together("checking", lambda: raising(unknown) if rank == 1 else 0))[0],
        "afterwards": ranks.collect("x", lambda: rank),
    }


def test_every_rank_gets_the_same_answer_or_the_same_error() -> None:
    all_scenes = results(run_ranks(3, scenes))
    assert [each.pop("together") for each in all_scenes] == [0, 10, 20]
    assert all_scenes[0] == all_scenes[1] == all_scenes[2]
    scene = all_scenes[0]
    assert scene["collect"] == [0, 10, 20]
    assert scene["first"] == "from 0"
    assert scene["distinct"] == [(0, {"rank": 0}), (2, {"rank": 1})]
    assert scene["same"] == [(0, "same")]
    assert scene["one fails"] == ("CheckpointError", "reading failed: rank 1: ValueError: bad")
    assert scene["full disk"][0] == "StorageError"
    assert scene["full disk"][1].startswith("writing failed: rank 2: OSError: [Errno 28] No space left on device")
    assert "Instead: free some space" in scene["full disk"][1]
    assert scene["first fails"] == ("CheckpointError", "listing failed: rank 0: ValueError: bad 0")
    assert scene["user"] == "UserErrors"
    assert scene["afterwards"] == [0, 1, 2]


def test_one_process_needs_no_group() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.collect("x", lambda: 7), ranks.first("x", lambda: 8)) == (0, 1, [7], 8)
    assert ranks.distinct({"a": 1}) == [(0, {"a": 1})]
    with pytest.raises(StorageError, match="Permission"):
        ranks.together("x", lambda: raising(PermissionError(errno.EACCES, "Permission denied")))
