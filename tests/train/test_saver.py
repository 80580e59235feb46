from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dthpc.errors import UserError
from dthpc.models.losses import next_token
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.rundir import RunDir
from dthpc.train.saver import Saver
from dthpc.train.state import TrainState
from tests.train.tasks import make_config


def saver(run: RunDir, **changes: object) -> Saver:
    fields = {"attempt": 0, "every": 5, "keep": 2, "keep_every": 0, "meta": {}, "removes": True, **changes}
    return Saver(run=run, **fields)


def save_at(keeper: Saver, step: int) -> None:
    config, device = make_config(), torch.device("cpu")
    model = parallelize(torch.nn.Linear(2, 2), next_token, make_mesh(Layout(), "cpu"), config, device)
    optimizer = torch.optim.AdamW([piece.tensor for piece in model.shards.pieces])
    model.module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    keeper.save(model, optimizer, TrainState(step=step, samples=4 * step))


def saved(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_it_is_due_at_multiples_only(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert [step for step in range(1, 16) if saver(run).due(step)] == [5, 10, 15]
    assert not any(saver(run, every=0).due(step) for step in range(1, 16))


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, ["step-00000015", "step-00000020"]),
        ({"keep_every": 10}, ["step-00000010", "step-00000015", "step-00000020"]),
        ({"keep": 0}, ["step-00000005", "step-00000010", "step-00000015", "step-00000020"]),
        ({"removes": False}, ["step-00000005", "step-00000010", "step-00000015", "step-00000020"]),
    ],
)
def test_old_checkpoints_go_and_those_to_keep_stay(tmp_path: Path, changes: dict[str, object], left: list[str]) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 15, 20):
        save_at(saver(run, **changes), step)
    assert saved(run) == left


def test_an_attempt_that_a_later_one_has_replaced_writes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(0).path.mkdir(parents=True)
    save_at(saver(run), 5)
    run.attempt(1).path.mkdir()
    with pytest.raises(UserError, match="attempt 0 may save no more"):
        save_at(saver(run), 10)
    assert saved(run) == ["step-00000005"]
    save_at(saver(run, attempt=1), 10)
    assert saved(run) == ["step-00000005", "step-00000010"]
