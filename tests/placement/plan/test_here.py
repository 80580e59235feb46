from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dthpc.config.schema import PlacementConfig
from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus, format_mask
from dthpc.placement.plan.here import plan_here, step_cpus, visible_words
from dthpc.placement.plan.wanted import read_wish
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Topology
from tests.placement import nodes

HERE = frozenset(os.sched_getaffinity(0))


def widened(topology: Topology) -> tuple[Topology, dict[str, str]]:
    """A topology of which this machine's CPUs are a part, and the environment of a step that may use all of it."""
    masks = ",".join(map(format_mask, (HERE, topology.existing or ())))
    return topology, {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": masks}


def test_the_wish_of_a_configuration() -> None:
    config = PlacementConfig(reserve="0,8", smt="all", cores_per_rank=4)
    degrees = {"pp": 1, "replicate": 1, "shard": 4, "cp": 1, "tp": 2}
    wish = read_wish(config, 8, 8, degrees, ["pp", "replicate", "shard", "cp", "tp"])
    assert wish == Wish(8, 8, cores_per_rank=4, smt="all", reserved=frozenset({0, 8}), axes=(("tp", 2), ("shard", 4)))
    assert read_wish(PlacementConfig(reserve="l3"), 1, None, {}, []).reserve == "l3"
    with pytest.raises(UserError, match=r"placement\.reserve"):
        read_wish(PlacementConfig(reserve="first"), 1, None, {}, [])
    with pytest.raises(UserError, match=r"placement\.smt"):
        read_wish(SimpleNamespace(**{**vars(PlacementConfig()), "smt": "two"}), 1, None, {}, [])


def test_masks_that_srun_gave_to_its_tasks_are_put_together() -> None:
    env = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x3,0xC"}
    assert step_cpus(env, {0, 1}) == {0, 1, 2, 3}
    # Of another step, of another kind, damaged: what this process may use counts.
    assert step_cpus(env, {8}) == {8}
    assert step_cpus({**env, "SLURM_CPU_BIND_TYPE": "cores"}, {0}) == {0}
    assert step_cpus({**env, "SLURM_CPU_BIND_LIST": "0xZZ"}, {0}) == {0}


def test_all_ranks_of_a_node_find_the_same_plan() -> None:
    topology, env = widened(nodes.mi250x())
    plans = [plan_here(topology, Wish(8, 8), rank, env) for rank in range(8)]
    assert all(plan == plans[0][0] for plan, _ in plans)
    assert [place for _, place in plans] == list(range(8))
    assert format_cpus(plans[0][0].places[0].near or ()) == "48-63,112-127"


def test_a_rank_that_is_shown_one_gpu_finds_its_place_by_it() -> None:
    topology, env = widened(nodes.mi250x())
    for rank, gpu in ((0, 4), (1, 0)):
        shown = [replace(each, compute=each.index == gpu or None) for each in topology.gpus or ()]
        seen = replace(topology, gpus=tuple(shown))
        plan, mine = plan_here(seen, Wish(8, 8), rank, {**env, "ROCR_VISIBLE_DEVICES": str(gpu)})
        assert [unit.name for unit in plan.places[mine].units] == [f"GPU{gpu}"]
        assert len({cpu for place in plan.places for cpu in place.cpus or ()}) == 64


def only(topology: Topology, own: Sequence[int]) -> Topology:
    """What a rank reads whose cgroup hides all other GPUs from the drivers: these number its own from 0."""
    shown = [
        replace(gpu, compute=True, index=own.index(gpu.index))
        if gpu.index in own
        else replace(gpu, compute=None, index=None, uuid=None)
        for gpu in topology.gpus or ()
    ]
    return replace(topology, gpus=tuple(shown))


@pytest.mark.parametrize(
    ("gpus", "views"),
    [
        (8, [[gpu] for gpu in range(8)]),
        (8, [[gpu] for gpu in reversed(range(8))]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # Half of a node, whose other half is another job's.
        (4, [[4], [5], [6], [7]]),
    ],
)
@pytest.mark.parametrize("hidden", [True, False])
def test_ranks_that_see_their_own_gpus_alone_do_not_meet_on_cores(
    gpus: int, views: list[list[int]], hidden: bool
) -> None:
    topology, env = widened(nodes.dgx_a100())
    taken: list[int] = []
    for rank, own in enumerate(views):
        seen = only(topology, own) if hidden else topology
        words = ",".join(map(str, range(len(own)) if hidden else own))
        plan, mine = plan_here(seen, Wish(len(views), gpus), rank, {**env, "CUDA_VISIBLE_DEVICES": words})
        place = plan.places[mine]
        assert [unit.gpu.uuid for unit in place.units] == [f"GPU-{gpu:08d}" for gpu in own]
        near = [(topology.gpus or ())[gpu].numa for gpu in own]
        assert place.memory in near
        taken += place.cpus or ()
        # The places' numbers need not be those of the ranks, so that no map from NICs to ranks is made.
        assert plan.by_gpu
    assert len(taken) == len(set(taken))


def test_gpus_of_other_jobs_are_left_out() -> None:
    topology, env = widened(nodes.mi250x())
    plan, mine = plan_here(topology, Wish(2, 2), 1, {**env, "ROCR_VISIBLE_DEVICES": "2,6"})
    assert [place.units[0].name for place in plan.places] == ["GPU2", "GPU6"]
    assert mine == 1


def test_ranks_without_gpus_pass_over_what_is_visible() -> None:
    plan, mine = plan_here(nodes.node(max(HERE) + 1, 1, threads=1), Wish(2, 0), 1, {"CUDA_VISIBLE_DEVICES": "7"})
    assert mine == 1
    assert [place.units for place in plan.places] == [(), ()]


def test_the_first_variable_that_restricts_counts() -> None:
    assert visible_words({}) is None
    assert visible_words({"CUDA_VISIBLE_DEVICES": ""}) is None
    assert visible_words({"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "0"}) == ["2", "3"]


@pytest.mark.parametrize("exported", ["0,1", "GPU-1234"])
def test_a_machine_without_gpus_has_none_to_restrict(exported: str) -> None:
    bare = nodes.node(max(HERE) + 1, 1, threads=1)
    plan, mine = plan_here(bare, Wish(2), 1, {"CUDA_VISIBLE_DEVICES": exported})
    assert mine == 1
    assert [place.units for place in plan.places] == [(), ()]
    with pytest.raises(UserError, match="0 GPUs are visible here"):
        plan_here(bare, Wish(2, 2), 1, {"CUDA_VISIBLE_DEVICES": exported})
