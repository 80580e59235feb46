"""Replicas that train by themselves: exact on the same number of them, from the last meeting on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dthpc.checkpoint import store
from dthpc.checkpoint.replicas import own_states, sources
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import Replica, TrainingState, own_key
from tests.ranks import pool

SHAPE = (3, 4)


def build(rank: int, replicas: int, shards: int, start: float) -> TrainingState:
    """One of `replicas` models, flat shards of a 3x4 weight on its ranks; 0 replicas: one model on all ranks."""
    index, shard = divmod(rank, shards)
    size = 12 // shards
    piece = Share("w", SHAPE, (0, 0), SHAPE, shard * size, (shard + 1) * size, nn.Parameter(torch.zeros(size)))
    own = start + index if replicas else start
    with torch.no_grad():
        piece.tensor.copy_(own + torch.arange(piece.start, piece.stop))
    optimizer = torch.optim.SGD([piece.tensor], lr=0.1, momentum=0.9)
    optimizer.state[piece.tensor]["momentum_buffer"] = piece.tensor.detach() + 100
    module = nn.Module()
    module.register_buffer("mean", torch.tensor([own]))
    replica = None
    if replicas:
        base = torch.arange(float(piece.start), piece.stop)
        replica = Replica(index, replicas, {"anchor": [base + start + 1000], "momentum": [base + start + 2000]})
    return TrainingState(module, optimizer, pieces=[piece], replica=replica, rng=False)


def values(state: TrainingState) -> dict[str, float]:
    """The first value of each tensor, less its place in the whole."""
    (piece,) = state.parameters()
    tensors = {"w": piece.tensor, "optim": state.optimizers()[0].state[piece.tensor]["momentum_buffer"]}
    if state.replica is not None:
        tensors |= {kind: each[0] for kind, each in state.replica.shared.items()}
    found = {
        key: (tensor.detach().flatten() - torch.arange(piece.start, piece.stop)) for key, tensor in tensors.items()
    }
    return {key: each[0].item() for key, each in found.items()} | {"mean": float(state.modules()[0].mean)}


def save(rank: int, root: Path, replicas: int, shards: int) -> None:
    store.save(root, 1, build(rank, replicas, shards, start=0.0), attempt=0)


def restore(rank: int, root: Path, replicas: int, shards: int) -> tuple[dict[str, float], tuple[str, ...]]:
    state = build(rank, replicas, shards, start=0.5)
    info = store.restore(root, state)
    assert info is not None
    return values(state), info.notes


def test_the_same_number_of_replicas_goes_on_each_as_it_was(tmp_path: Path) -> None:
    pool().run(4, save, tmp_path, 2, 2)
    for shards in (2, 1):
        answers = pool().run(2 * shards, restore, tmp_path, 2, shards)
        for rank, (found, notes) in enumerate(answers):
            index = rank // shards
            own = {"w": index, "optim": 100 + index, "mean": index}
            assert found == {**own, "anchor": 1000, "momentum": 2000}
            assert notes == ()


def test_another_number_of_replicas_begins_at_the_last_meeting(tmp_path: Path) -> None:
    pool().run(4, save, tmp_path, 2, 2)
    for found, notes in pool().run(3, restore, tmp_path, 3, 1):
        assert found == {"w": 1000, "optim": 100, "mean": 0, "anchor": 1000, "momentum": 2000}
        assert len(notes) == 1
        assert notes[0].startswith("3 replicas go on from the last meeting of 2 replicas")


def test_replicas_become_one_model_at_the_last_meeting(tmp_path: Path) -> None:
    pool().run(2, save, tmp_path, 2, 1)
    for found, notes in pool().run(2, restore, tmp_path, 0, 2):
        assert found == {"w": 1000, "optim": 100, "mean": 0}
        assert notes[0].startswith("one model goes on from the last meeting of 2 replicas")


def test_one_model_becomes_replicas_that_begin_from_it(tmp_path: Path) -> None:
    pool().run(2, save, tmp_path, 0, 2)
    for found, notes in pool().run(2, restore, tmp_path, 2, 1):
        assert found == {"w": 0, "optim": 100, "mean": 0, "anchor": 0, "momentum": 0}
        assert notes == ("2 replicas begin from one model, each with its optimizer state",)


SAVED = ["replica.0.model.w", "replica.1.model.w", "replica.1.optim.w.step", "outer.anchor.w", "outer.momentum.w"]


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        (
            Replica(1, 2, {}),
            {"model.w": SAVED[1], "optim.w.step": SAVED[2], SAVED[3]: SAVED[3], SAVED[4]: SAVED[4]},
        ),
        (Replica(2, 3, {}), {"model.w": "outer.anchor.w", SAVED[3]: SAVED[3], SAVED[4]: SAVED[4]}),
        (None, {"model.w": "outer.anchor.w"}),
    ],
)
def test_where_a_replica_finds_its_tensors(replica: Replica | None, expected: dict[str, str]) -> None:
    assert sources(SAVED, 2, replica) == expected


def test_a_replicas_keys_are_told_from_those_of_another() -> None:
    assert own_key("model.w", Replica(1, 2, {})) == "replica.1.model.w"
    assert own_key("model.w", None) == "model.w"
    many = [f"replica.{k}.model.w" for k in range(12)]
    assert sources(many, 12, Replica(1, 12, {})) == {"model.w": "replica.1.model.w"}


@pytest.mark.parametrize(
    ("count", "replica", "expected"),
    [(2, Replica(1, 2, {}), 1), (2, Replica(1, 3, {}), 0), (2, None, 0), (0, Replica(1, 2, {}), 7), (0, None, 7)],
)
def test_whose_state_of_an_object_a_replica_takes(count: int, replica: Replica | None, expected: int) -> None:
    saved = {f"replica.{k}.scaler": k for k in range(count)} or {"scaler": 7}
    assert own_states({"train": 3, **saved}, count, replica) == {"train": 3, "scaler": expected}


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        self.count = state_dict["count"]


def counted(rank: int, root: Path) -> int:
    counter, fresh = Counter(10 + rank), Counter(0)
    for own, restores in ((counter, False), (fresh, True)):
        state = build(rank, 2, 1, start=0.0)
        assert state.replica is not None
        state.replica.stateful["scaler"] = own
        store.restore(root, state) if restores else store.save(root, 1, state, attempt=0)
    return fresh.count


def test_each_replica_gets_its_own_object_states_back(tmp_path: Path) -> None:
    assert pool().run(2, counted, tmp_path) == [10, 11]
