from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dthpc.config.schema import PlacementConfig
from dthpc.errors import UserError
from dthpc.placement.bind import bind_rank, who_binds
from dthpc.placement.plan.wanted import wanted_of, wish_of
from dthpc.placement.plan.wish import Wish

ORDER = ["pp", "replicate", "shard", "cp", "tp"]
CODE = """
import json, os, sys
from pathlib import Path
from dthpc.placement.bind import bind_rank
bound = bind_rank(json.loads(sys.argv[1]), int(sys.argv[2]), dict(os.environ))
bound.verify()
bound.write(Path(sys.argv[3]), int(sys.argv[2]))
print(json.dumps(sorted(os.sched_getaffinity(0))))
"""


def wanted(ranks: int = 2, **changes: object) -> dict[str, Any]:
    config = PlacementConfig(**changes)  # type: ignore[arg-type]
    made = wanted_of(config, ranks, 0, 1, dict.fromkeys(ORDER, 1), ORDER)
    told: dict[str, Any] = json.loads(json.dumps(made))
    return told


def run(told: dict[str, Any], rank: int, folder: Path) -> tuple[set[int], dict[str, Any]]:
    command = [sys.executable, "-c", CODE, json.dumps(told), str(rank), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout)), json.loads((folder / "placement" / f"rank-{rank:05d}.json").read_text())


def test_what_the_launch_plan_says_comes_back_as_the_wish() -> None:
    degrees = {**dict.fromkeys(ORDER, 1), "tp": 2}
    config = PlacementConfig(reserve="0,4", nics=2)
    told = json.loads(json.dumps(wanted_of(config, 4, 4, 2, degrees, ORDER)))
    assert wish_of(told) == Wish(4, 4, nics=2, reserved=frozenset({0, 4}), axes=(("tp", 2),))
    with pytest.raises(UserError, match=r"placement\.bind=all: .*one of auto, rank, srun, none"):
        wanted(bind="all")


def test_ranks_bind_themselves_and_leave_a_record(tmp_path: Path) -> None:
    told = wanted(bind="rank", strict=True)
    (first, record), (second, _) = (run(told, rank, tmp_path) for rank in range(2))
    assert first
    assert second
    assert len(os.sched_getaffinity(0)) < 2 or not first & second
    assert record["verification"]["holds"]
    assert [finding["what"] for finding in record["verification"]["findings"]][:2] == ["threads", "memory"]
    assert record["place"]["why"]["cores"]


def test_a_rank_that_shall_not_bind_stays_where_it_is(tmp_path: Path) -> None:
    mask, record = run(wanted(bind="none"), 0, tmp_path)
    assert mask == set(os.sched_getaffinity(0))
    assert record["settings"]["affinity"] is None
    assert "placement.bind=none" in record["reason"]


def test_a_wish_that_does_not_fit_stops_only_a_strict_run() -> None:
    told = wanted(reserve=",".join(map(str, os.sched_getaffinity(0))))
    bound = bind_rank(told, 0, {})
    assert bound.plan is None
    assert "no core is left" in bound.reason
    assert bound.verify().findings == ()
    with pytest.raises(UserError, match="no core is left"):
        bind_rank({**told, "strict": True}, 0, {})


@pytest.mark.parametrize(
    ("bind", "env", "binds"),
    [
        ("auto", {}, False),
        ("auto", {"SLURM_JOB_ID": "1"}, True),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "8"}, True),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "4"}, False),
        ("rank", {}, True),
        ("srun", {"SLURM_JOB_ID": "1"}, False),
        ("none", {"SLURM_JOB_ID": "1"}, False),
    ],
)
def test_cores_are_bound_where_they_are_the_runs_alone(bind: str, env: dict[str, str], binds: bool) -> None:
    held, reason = who_binds(bind, env, frozenset(range(8)))
    assert held is binds
    assert ("not bound" in reason or "srun" in reason) is not binds
