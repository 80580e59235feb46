"""The dry run."""

from __future__ import annotations

import json
from pathlib import Path

from dthpc.errors import UserError
from dthpc.launch.planning import make_plan
from dthpc.launch.preview import ROWS, Preview
from dthpc.launch.verdicts import error, ok
from dthpc.rundir import RunDir
from tests.launch.sites import make_config, make_site


def test_everything_is_shown_to_the_byte(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    config = make_config(tmp_path, nodes="2-3", tasks_per_node=2, gpus_per_node=2, environment={"A": "1 2"})
    plan = make_plan(config, run, make_site())
    preview = Preview(run, plan, [ok("time", "long enough")])
    text = preview.text()
    assert plan.batch_script is not None
    assert plan.batch_script in text
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=1" in text
    assert f"--output={run.path}/attempts/0/rank-%5t.log" in text
    assert "4 ranks on 2 nodes, up to 6 on 3" in text
    assert "  3     1     1      1      1        1\n" in text
    assert "A  1 2" in text
    assert text.endswith("Nothing was submitted.")
    told = json.loads(json.dumps(preview.as_dict(), allow_nan=False))
    assert told["batch_script"] == plan.batch_script
    assert [row["node"] for row in told["ranks"]] == [0, 0, 1, 1]
    assert (told["refused"], told["checks"][0]["status"]) == (False, "ok")
    assert not run.path.exists()


def test_the_next_attempt_is_the_one_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.attempt(4).path.mkdir(parents=True)
    words = Preview(run, make_plan(make_config(tmp_path), run, make_site()), []).ranks_command
    assert f"--output={run.path}/attempts/5/rank-%5t.log" in words


def test_a_local_run_shows_the_command_of_a_rank(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    preview = Preview(run, make_plan(make_config(tmp_path, kind="local"), run), [])
    assert preview.ranks_command[-3:] == ["-m", "dthpc.attempt.rank", str(run.path)]
    assert "batch script" not in preview.text()


def test_mistakes_are_shown_where_nothing_can_be_planned(tmp_path: Path) -> None:
    preview = Preview(RunDir(tmp_path / "r"), None, [error("time", UserError("is no time", key="cluster.time"))])
    assert preview.refused
    assert "ERROR  cluster.time: is no time" in preview.text()
    assert preview.text().endswith("nothing would be submitted.")
    assert preview.as_dict()["ranks"] == []


def test_a_long_table_is_cut(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    plan = make_plan(make_config(tmp_path, nodes=3, tasks_per_node=100), run, make_site())
    text = Preview(run, plan, []).text()
    assert f"… and {300 - ROWS} more" in text
