"""Replicas that share nodes sum gradients in levels where it measures quicker: on a real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.monitor.events import read_events
from dthpc.rundir import read_json
from tests.integration.trial import Trial, write_text


@pytest.mark.slurm
@pytest.mark.parametrize("wanted", ["auto", "true"])
def test_two_nodes_of_two_ranks_sum_in_levels_or_in_one_step_and_train_alike(
    minicluster: Any, tmp_path: Path, wanted: str
) -> None:
    write_text(tmp_path / "text")
    words = ["cluster.tasks_per_node=2", f"comm.hierarchical={wanted}"]
    levels = Trial(tmp_path, "levels", *words, "cluster.nodes=2", cluster=minicluster).submit()
    levels.done()
    (told,) = [event for event in read_events(levels.run.events)[0] if event["kind"] == "hierarchical"]
    if wanted == "true":
        assert told["used"] is True
        assert "2 ranks on each of 2 nodes" in told["reason"]
        assert read_json(levels.run.levels) is None
    else:
        kept = read_json(levels.run.levels)["4 replicas on 2 nodes"]  # type: ignore[index]
        assert kept["used"] is told["used"]
        assert len(kept["times"]) == 2
        return
    plain = Trial(tmp_path, "plain", "cluster.tasks_per_node=4").submit()
    plain.end(0)
    losses = levels.losses()
    assert losses.keys() == plain.losses().keys()
    for step, loss in plain.losses().items():
        assert losses[step] == pytest.approx(loss, rel=1e-4)
