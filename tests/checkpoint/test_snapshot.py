from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dthpc.checkpoint import commit as protocol
from dthpc.checkpoint import store
from dthpc.checkpoint.manifest import Manifest
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.snapshot import snapshot
from tests.checkpoint.harness import results, run_ranks
from tests.checkpoint.jobs import build, draws, fingerprint, train


def written_later(rank: int, root: Path, kind: str) -> Any:
    """Copy the state at step 2, train on, and only then write and commit; what was restored and what was copied."""
    ranks = Ranks()
    job = build(kind)
    train(job, 0, 2, rank)
    taken = snapshot(job.state, 2, ranks, copy=True)
    expected = fingerprint(job), draws()
    train(job, 2, 5, rank)
    partial = ranks.first("x", lambda: protocol.begin(root, 2, attempt=0))
    files = store.write(taken, partial, ranks)
    manifest = Manifest(2, 0, ranks.size, time.time(), files, taken.described)
    ranks.first("x", lambda: protocol.commit(partial, manifest))
    other = build(kind, seed=4)
    store.restore(root, other.state)
    return (fingerprint(other), draws()) == expected, fingerprint(job) != expected[0]


@pytest.mark.parametrize("kind", ["ddp", "zero"])
def test_a_copied_snapshot_can_be_written_while_training_goes_on(tmp_path: Path, kind: str) -> None:
    assert results(run_ranks(2, written_later, tmp_path, kind)) == [(True, True)] * 2
