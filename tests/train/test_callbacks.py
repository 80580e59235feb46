from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from dthpc.train.callbacks import CheckpointRecord, EvalRecord, StepRecord
from tests.ranks import pool
from tests.train import tasks


def test_a_callback_need_override_nothing(tmp_path: Path) -> None:
    silent = {"silent": {"_target_": "dthpc.train.callbacks.Callback"}}
    changes = {"train": {"steps": 1, "eval_every": -1}, "callbacks": silent}
    (result,) = pool().run(1, tasks.train_with, str(tmp_path), 0, changes)
    assert result.outcome == "finished"


def test_callbacks_are_told_on_every_rank_in_the_order_of_what_happens(tmp_path: Path) -> None:
    changes = {"train": {"steps": 3, "eval_every": 2, "eval_samples": 2}, "checkpoint": {"every": 2}}
    ranks = pool().run(2, tasks.train_with, str(tmp_path), 0, changes)
    assert ranks[0].calls == [
        "start", "step 1", "step 2", "checkpoint 2", "eval 2", "step 3", "checkpoint 3", "eval 3", "end",
    ]  # fmt: skip
    assert ranks[1].calls == ranks[0].calls


def test_a_step_record_is_the_same_on_all_ranks_but_for_its_time(tmp_path: Path) -> None:
    changes = {"train": {"steps": 2, "eval_every": -1}}
    first, second = pool().run(2, tasks.train_with, str(tmp_path), 0, changes)
    shared = [item.name for item in fields(StepRecord) if item.name != "seconds"]
    for one, other in zip(first.records, second.records, strict=True):
        assert {name: getattr(one, name) for name in shared} == {name: getattr(other, name) for name in shared}


@pytest.mark.parametrize(
    "record",
    [
        StepRecord(1, 2.0, 0.1, 1.0, 8, 4, 0.5, 0.1),
        EvalRecord(1, 2.0, None, 8, 0.5, True),
        CheckpointRecord(1, Path("step-00000001"), 0.5, None),
    ],
)
def test_a_callback_cannot_change_a_record_for_those_after_it(record: object) -> None:
    with pytest.raises(FrozenInstanceError):
        record.step = 7  # type: ignore[attr-defined]


def test_users_import_the_class_without_torch() -> None:
    code = "import sys, dthpc.train.callbacks; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
