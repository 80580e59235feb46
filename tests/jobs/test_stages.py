from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dthpc.rundir import RunDir
from tests.ranks import pool
from tests.train import tasks as training

CHANGES: dict[str, Any] = {"model": {"layers": 4}, "parallel": {"pp": 2, "stages": "measured"}, "train": {"steps": 4}}
CASE = "4 layers in 2 stages"


def blocks_of(result: training.Result) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in result.parameters if name.startswith("blocks.")}


def test_what_the_first_attempt_measured_is_what_later_attempts_use(tmp_path: Path) -> None:
    path = RunDir(tmp_path).stages
    stop = {"stopper": {"_target_": "tests.train.tasks.StopAfter", "step": 1, "rank": 0}}
    ranks = pool().run(2, training.train_with, str(tmp_path), 0, {**CHANGES, "callbacks": stop})
    dealt = json.loads(path.read_text())[CASE]
    assert sum(dealt) == 4
    assert [len(blocks_of(result)) for result in ranks] == dealt
    # No measurement gives this.
    path.write_text(json.dumps({CASE: [3, 1], "another case": [1]}))
    ranks = pool().run(2, training.train_with, str(tmp_path), 1, CHANGES)
    assert [len(blocks_of(result)) for result in ranks] == [3, 1]
    assert ranks[0].outcome == "finished"


def test_another_number_of_stages_is_measured_for_itself(tmp_path: Path) -> None:
    path = RunDir(tmp_path).stages
    path.write_text(json.dumps({"4 layers in 4 stages": [1, 1, 1, 1]}))
    pool().run(2, training.train_with, str(tmp_path), 0, CHANGES)
    kept = json.loads(path.read_text())
    assert kept.pop("4 layers in 4 stages") == [1, 1, 1, 1]
    assert kept.keys() == {CASE}


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"pp": 1, "stages": "measured"}])
def test_nothing_is_measured_where_it_is_not_asked_for_or_there_is_no_pipeline(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    pool().run(2, training.train_with, str(tmp_path), 0, {"parallel": parallel, "train": {"steps": 1}})
    assert not RunDir(tmp_path).stages.exists()


def test_a_loss_that_breaks_its_contract_is_told_while_measuring(tmp_path: Path) -> None:
    changes = {**CHANGES, "loss": {"_target_": "tests.train.tasks.only_sum"}}
    answers = pool().run(2, training.raises, str(tmp_path), changes)
    assert answers[0][0] == "UserError"
    assert "it returned only one value" in answers[0][1]
    assert answers[1][0]
