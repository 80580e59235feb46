"""srun's own binding, on a real Slurm whose task plugin binds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dthpc.placement.apply import srun_binding
from dthpc.placement.bind import srun_words
from dthpc.placement.cpuset import parse_cpus
from dthpc.placement.decide import decide
from dthpc.placement.plan.wish import Wish
from dthpc.placement.read.live import read_live
from tests.conftest import missing_for_slurm
from tests.placement.test_bind import wanted

pytestmark = pytest.mark.slurm

CODE = (
    "import json, os\nfrom dthpc.placement.kernel import memory_policy\n"
    "from dthpc.placement.plan.here import step_cpus\n"
    "print(json.dumps([int(os.environ['SLURM_LOCALID']), sorted(os.sched_getaffinity(0)), memory_policy()[0], "
    "sorted(step_cpus(os.environ, os.sched_getaffinity(0)))]))"
)


@pytest.fixture(scope="module")
def binding_slurm() -> Iterator[Any]:
    reason = missing_for_slurm()
    if reason is not None:
        pytest.skip(reason)
    from mini import Cluster

    cpus = len(os.sched_getaffinity(0))
    settings = {"TaskPlugin": "task/affinity"}
    with Cluster(f"bind{os.getpid()}", nodes=1, cpus=cpus, accounting=False, settings=settings) as cluster:
        yield cluster


def test_each_task_is_bound_to_its_mask_and_its_memory_node(binding_slurm: Any) -> None:
    plan = decide(read_live(tools=False), Wish(2))
    words = ["srun", "-n2", "--exclusive", *srun_binding(plan), sys.executable, "-c", CODE]
    found = sorted(json.loads(line) for line in binding_slurm.output(*words).splitlines())
    every = set().union(*(place.cpus or () for place in plan.places))
    for place, (local, cpus, mode, step) in zip(plan.places, found, strict=True):
        assert (local, set(cpus)) == (place.local_rank, place.cpus)
        assert mode != 0
        # From its own mask a task learns what all of the node's tasks have together.
        assert set(step) == every


def test_a_part_of_a_node_is_not_bound_by_srun() -> None:
    from dataclasses import replace

    from dthpc.errors import UserError
    from tests.placement import nodes

    whole = nodes.mi250x()
    assert srun_words(wanted(), whole)[0].startswith("--cpu-bind=mask_cpu:0x")
    with pytest.raises(UserError, match=r"placement\.bind=srun: .*whole nodes"):
        srun_words(wanted(), replace(whole, allowed=parse_cpus("0-7")))
