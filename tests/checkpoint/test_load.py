from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dthpc.checkpoint import commit as protocol
from dthpc.checkpoint import rng, store
from dthpc.checkpoint.manifest import Manifest, checksum
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.replicas import state_shares
from dthpc.checkpoint.snapshot import snapshot
from dthpc.checkpoint.state import TrainingState
from tests.checkpoint.harness import results, run_ranks
from tests.checkpoint.jobs import build, draws, fingerprint, train


def rank_state(rank: int, layout: str, fill: float, size: int = 3, name: str = "error") -> TrainingState:
    """A state with a tensor of each rank's own."""
    return TrainingState(nn.Linear(2, 2), layout=layout, extra={name: torch.full((size,), fill + rank)})


def save_own(rank: int, root: Path, layout: str) -> Any:
    torch.manual_seed(rank)
    state = rank_state(rank, layout, fill=10.0)
    store.save(root, 1, state, attempt=0)
    return draws()[2]


def restore_own(rank: int, root: Path, layout: str, size: int, name: str) -> Any:
    state = rank_state(rank, layout, 99.0, size if rank else 3, name)
    info = store.restore(root, state)
    assert info is not None
    return state.extra[name].tolist()[0], info.notes, draws()[2]


def test_tensors_and_random_numbers_of_single_ranks_come_back_in_the_same_layout(tmp_path: Path) -> None:
    drawn = results(run_ranks(2, save_own, tmp_path, "dp=2"))
    found = results(run_ranks(2, restore_own, tmp_path, "dp=2", 3, "error"))
    assert found == [(10.0, (), drawn[0]), (11.0, (), drawn[1])]


@pytest.mark.parametrize(
    ("ranks", "layout", "size", "name"),
    [(2, "tp=2", 3, "error"), (3, "dp=3", 3, "error"), (2, "dp=2", 4, "error"), (2, "dp=2", 3, "other")],
)
def test_otherwise_no_rank_gets_its_tensors_and_that_is_said(
    tmp_path: Path, ranks: int, layout: str, size: int, name: str
) -> None:
    drawn = results(run_ranks(2, save_own, tmp_path, "dp=2"))
    found = results(run_ranks(ranks, restore_own, tmp_path, layout, size, name))
    assert [value for value, _, _ in found] == [99.0 + rank for rank in range(ranks)]
    assert {notes for _, notes, _ in found} == {found[0][1]}
    assert "did not come back" in found[0][1][0]
    assert ([stream for _, _, stream in found] == drawn) == (layout == "dp=2")


def test_tensors_that_no_rank_wants_any_more_are_told(tmp_path: Path) -> None:
    store.save(tmp_path, 1, rank_state(0, "dp=1", 1.0), attempt=0)
    info = store.restore(tmp_path, TrainingState(nn.Linear(2, 2)))
    assert info is not None
    assert info.notes == ("error of each rank did not come back: no rank keeps it now (dp=1)",)


def commit_as_before(root: Path, state: TrainingState) -> None:
    """Commit a checkpoint as the first version of this package did: whole tensors, by torch's own planner."""
    taken = snapshot(state, 3, Ranks())
    tensors = {share.name: share.tensor.detach() for share in state_shares(state)}
    partial = protocol.begin(root, 3, attempt=0)
    dcp.save({**tensors, "rng.00000": rng.capture()}, checkpoint_id=partial, no_dist=True)
    records = {key: taken.records[key] for key in ("scalars", "stateful", "optimizer")}
    (partial / store.RECORDS_NAME).write_text(json.dumps(records))
    files = {path.name: checksum(path) for path in partial.iterdir()}
    protocol.commit(partial, Manifest(3, 0, 1, time.time(), files, taken.described))


@pytest.mark.parametrize(("ranks", "kind"), [(0, "plain"), (2, "zero")])
def test_checkpoints_of_whole_tensors_are_read_in_any_layout(tmp_path: Path, ranks: int, kind: str) -> None:
    job = build()
    train(job, 0, 3)
    commit_as_before(tmp_path, job.state)
    for found, info in results(run_ranks(ranks, restored, tmp_path, kind)):
        assert found == fingerprint(job)
        assert info.notes == ()


def restored(rank: int, root: Path, kind: str) -> Any:
    job = build(kind, seed=5)
    info = store.restore(root, job.state)
    return fingerprint(job), info


def test_an_optimizer_without_state_gets_it_in_the_shape_of_its_pieces(tmp_path: Path) -> None:
    job = build()
    train(job, 0, 2)
    store.save(tmp_path, 2, job.state, attempt=0)
    for shapes in results(run_ranks(2, state_shapes, tmp_path)):
        assert shapes
        assert all(kept == piece for piece, kept in shapes)


def state_shapes(rank: int, root: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    job = build("zero", seed=5)
    store.restore(root, job.state)
    pieces = job.state.parameters()
    return [(tuple(p.tensor.shape), tuple(job.optimizer.state[p.tensor]["exp_avg"].shape)) for p in pieces]


def test_pieces_in_a_file_are_filled_and_saved_where_they_lie(tmp_path: Path) -> None:
    job = build()
    train(job, 0, 2)
    expected = fingerprint(job)
    for number, parameter in enumerate(job.model.parameters()):
        mapped = torch.from_file(str(tmp_path / f"{number}.bin"), shared=True, size=parameter.numel())
        mapped.copy_(parameter.detach().flatten())
        parameter.data = mapped.view(parameter.shape)
    store.save(tmp_path / "checkpoints", 2, job.state, attempt=0)
    for parameter in job.model.parameters():
        parameter.data.zero_()
    store.restore(tmp_path / "checkpoints", job.state)
    assert fingerprint(job) == expected
    for number, parameter in enumerate(job.model.parameters()):
        stored = torch.from_file(str(tmp_path / f"{number}.bin"), shared=False, size=parameter.numel())
        assert torch.equal(stored, parameter.detach().flatten())
