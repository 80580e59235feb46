from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.config.schema import PlacementConfig
from dthpc.errors import UserError
from dthpc.placement.plan.offline import planned
from dthpc.placement.plan.wanted import wanted_of

TEXT = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\t0-7\t0
GPU1\tNV4\t X \t8-15\t1
"""


def test_a_dry_run_plans_for_a_recorded_node(tmp_path: Path) -> None:
    text = tmp_path / "topo.txt"
    text.write_text(TEXT)
    plan = planned(wanted_of(PlacementConfig(topology=str(text)), 2, 2, 1, {}, []), here=False)
    assert plan is not None
    assert [(rank, place.units[0].name) for rank, _, place in plan.rows()] == [(0, "GPU0"), (1, "GPU1")]
    with pytest.raises(UserError, match="2 GPUs are visible"):
        planned(wanted_of(PlacementConfig(topology=str(text)), 4, 4, 1, {}, []), here=False)


def test_a_local_run_is_planned_on_this_machine_and_others_are_not_guessed() -> None:
    wanted = wanted_of(PlacementConfig(), 1, 0, 1, {}, [])
    plan = planned(wanted, here=True)
    assert plan is not None
    assert plan.nodes[0][1].places[0].cpus
    assert planned(wanted, here=False) is None
    assert planned({}, here=True) is None
