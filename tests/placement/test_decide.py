"""Documented maps of real machines come out of their topologies; nothing in the package knows their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, format_cpus, parse_cpus
from dthpc.placement.decide import decide
from dthpc.placement.plan.places import NodePlan
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Core, Gpu, Nic, NumaNode, Topology
from tests.placement import nodes

# GPU: CPUs nearest to it, its memory node, and its NIC where the documents tell one ("" where they say that none is
# near). Leonardo's map is not in any document that was found, and is not here. JUWELS Booster's are in conflict: POP's
# page on it (co-design.pop-coe.eu, "GPU affinity") tells memory nodes 3, 1, 7, 5 of GPUs 0 to 3, and binds to 3, 1, 5,
# 7; `nvidia-smi topo -m` of such a node tells the first, and so does the topology here.
Map = dict[str, tuple[str, int, str | None]]
_GPU_DIES: Map = {
    "GPU0": ("48-55", 3, None), "GPU1": ("56-63", 3, None), "GPU2": ("16-23", 1, None), "GPU3": ("24-31", 1, None),
    "GPU4": ("0-7", 0, None), "GPU5": ("8-15", 0, None), "GPU6": ("32-39", 2, None), "GPU7": ("40-47", 2, None),
}  # fmt: skip
DOCUMENTED: dict[str, tuple[Callable[[], Topology], Map]] = {
    "DGX A100": (nodes.dgx_a100, {
        "GPU0": ("48-63", 3, "mlx5_0"), "GPU1": ("48-63", 3, "mlx5_1"), "GPU2": ("16-31", 1, "mlx5_2"),
        "GPU3": ("16-31", 1, "mlx5_3"), "GPU4": ("112-127", 7, "mlx5_6"), "GPU5": ("112-127", 7, "mlx5_7"),
        "GPU6": ("80-95", 5, "mlx5_8"), "GPU7": ("80-95", 5, "mlx5_9"),
    }),
    "DGX H100": (nodes.dgx_h100, {
        f"GPU{i}": ("0-55" if i < 4 else "56-111", i // 4, f"mlx5_{nic}")
        for i, nic in enumerate((0, 3, 4, 5, 6, 9, 10, 11))
    }),
    "Perlmutter": (nodes.perlmutter, {
        f"GPU{i}": (f"{48 - 16 * i}-{63 - 16 * i}", 3 - i, f"hsn{i}") for i in range(4)
    }),
    "Polaris": (nodes.polaris, {
        "GPU0": ("24-31", 3, ""), "GPU1": ("16-23", 2, "mlx5_1"), "GPU2": ("8-15", 1, ""), "GPU3": ("0-7", 0, "mlx5_0"),
    }),
    "Frontier and LUMI-G": (nodes.mi250x, _GPU_DIES),
    "JUWELS Booster": (nodes.juwels_booster, {
        "GPU0": ("18-23", 3, "mlx5_0"), "GPU1": ("6-11", 1, "mlx5_1"), "GPU2": ("42-47", 7, "mlx5_2"),
        "GPU3": ("30-35", 5, "mlx5_3"),
    }),
    "MareNostrum 5": (nodes.marenostrum5, {
        f"GPU{i}": (f"{20 * i}-{20 * i + 19}", i // 2, f"mlx5_{i}") for i in range(4)
    }),
    "Alps GH200": (nodes.gh200, {f"GPU{i}": (f"{72 * i}-{72 * i + 71}", i, f"hsn{i}") for i in range(4)}),
    "Aurora": (nodes.aurora, {
        f"GPU{i // 2}.{i % 2}": (f"{8 * i + 1 + 4 * (i // 6)}-{8 * i + 8 + 4 * (i // 6)}", i // 6, None)
        for i in range(12)
    }),
    "Summit": (nodes.summit, {f"GPU{i}": ("0-83" if i < 3 else "88-171", 8 * (i // 3), None) for i in range(6)}),
}  # fmt: skip
RESERVED = {"Aurora": "0,104,52,156", "Summit": "84-87,172-175"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_map_comes_out_of_the_topology(name: str) -> None:
    build, expected = DOCUMENTED[name]
    plan = decide(build(), Wish(len(expected), reserved=parse_cpus(RESERVED.get(name, ""))))
    assert [place.units[0].name for place in plan.places] == list(expected)
    for place, (cpus, memory, nic) in zip(plan.places, expected.values(), strict=True):
        assert place.cpus
        assert place.cpus <= parse_cpus(cpus)
        assert place.memory == (memory,)
        if nic is not None:
            assert [choice.nic.name for choice in place.nics if choice.near] == ([nic] if nic else [])
        assert set(place.why) == {"gpu", "cores", "memory", "nic"}
        assert all(place.why.values())


def test_frontier_leaves_the_first_core_of_each_cache_alone_and_orders_cores_by_gpu() -> None:
    plan = decide(nodes.mi250x(), Wish(8, reserve="l3"))
    cores = "49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47"
    assert [format_cpus(place.cpus or ()) for place in plan.places] == cores.split()
    assert format_cpus(plan.reserved) == "0,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120"


def test_aurora_by_whole_gpus() -> None:
    plan = decide(nodes.aurora(), Wish(6, cores_per_rank=16, reserved=parse_cpus("0,104,52,156")))
    assert [place.units[0].name for place in plan.places] == [f"GPU{i}" for i in range(6)]
    masks = ":".join(format_cpus(place.cpus or ()) for place in plan.places)
    assert masks == "1-16:17-32:33-48:53-68:69-84:85-100"


def test_a_nic_of_a_card_with_two_dies_carries_both() -> None:
    plan = decide(nodes.mi250x(), Wish(8))
    assert [place.nics[0].nic.name for place in plan.places] == [f"hsn{i // 2}" for i in range(8)]


def test_a_gpu_without_a_near_nic_takes_one_of_the_others_and_never_one_that_is_far_from_all() -> None:
    nics = [nodes.hca("mlx5_0"), nodes.hca("mlx5_1")]
    links = nodes.near("PXB", {0: ["mlx5_1"]}, 2, ["mlx5_0", "mlx5_1"])
    plan = decide(nodes.node(4, 2, gpus=[nodes.gpu(0, 0), nodes.gpu(1, 1)], nics=nics, links=links), Wish(2))
    assert [[choice.nic.name for choice in place.nics] for place in plan.places] == [["mlx5_1"], ["mlx5_1"]]
    assert "none is near to GPU1" in plan.places[1].why["nic"]


def test_shares_are_whole_caches_where_these_come_out_even() -> None:
    plan = decide(nodes.node(16, 1, threads=1, l3=4), Wish(2, reserved=frozenset({0})))
    assert [format_cpus(place.cpus or ()) for place in plan.places] == ["1-7", "8-15"]


def test_memory_of_a_gpu_is_never_bound_to() -> None:
    topology = nodes.gh200()
    # The GPU's own memory is the nearest that there is, and still none to bind to.
    away = {12: 11, 0: 20, 1: 10, 2: 30, 3: 30, 4: 40, 20: 40, 28: 40}
    emptied = tuple(
        replace(each, memory_bytes=0, distances=away) if each.index == 1 else each for each in topology.numa or ()
    )
    plan = decide(replace(topology, numa=emptied), Wish(4))
    assert plan.places[1].memory == (0,)
    assert "no memory" in plan.places[1].why["memory"]


# --- who sits next to whom ------------------------------------------------------------------------------------------


def crossed() -> Topology:
    """Four GPUs of which 0 and 2, and 1 and 3, are joined."""
    links = [nodes.Link("GPU0", "GPU2", "SYS", "nvlink", 4), nodes.Link("GPU1", "GPU3", "SYS", "nvlink", 4)]
    return nodes.node(32, 2, gpus=[nodes.gpu(i, i % 2) for i in range(4)], links=links)


def test_ranks_that_talk_most_get_gpus_that_are_joined() -> None:
    plan = decide(crossed(), Wish(4, axes=(("tp", 2), ("shard", 2))))
    pairs = [{plan.places[rank].units[0].name for rank in pair} for pair in ((0, 1), (2, 3))]
    assert pairs == [{"GPU0", "GPU2"}, {"GPU1", "GPU3"}]
    assert "tp" in plan.places[0].why["gpu"]


def test_the_axis_that_talks_most_wins_wherever_it_stands() -> None:
    plan = decide(crossed(), Wish(4, axes=(("pp", 2), ("tp", 2))))
    assert {plan.places[rank].units[0].name for rank in (0, 2)} in ({"GPU0", "GPU2"}, {"GPU1", "GPU3"})


def test_without_a_layout_gpus_go_by_number() -> None:
    plan = decide(crossed(), Wish(4))
    assert [place.units[0].name for place in plan.places] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert plan.places[0].why["gpu"] == "by number"


def test_cores_follow_the_gpu_wherever_its_rank_is() -> None:
    moved = decide(crossed(), Wish(4, axes=(("tp", 2), ("shard", 2))))
    plain = decide(crossed(), Wish(4))
    cores = [{place.units[0].name: place.cpus for place in plan.places} for plan in (moved, plain)]
    assert cores[0] == cores[1]


def test_few_ranks_that_talk_take_gpus_that_are_joined() -> None:
    plan = decide(crossed(), Wish(2, axes=(("tp", 2),)))
    assert {place.units[0].name for place in plan.places} == {"GPU0", "GPU2"}
    assert "2 of 4 GPUs are not used" in plan.notes


# --- threads, helpers, reserved cores -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smt", "compute", "helpers"),
    [("one", "0-5", "6-7"), ("all", "0-5,16-21", "6-7,22-23"), ("spread", "0-7", "22-23")],
)
def test_policies_for_hardware_threads(smt: str, compute: str, helpers: str) -> None:
    topology = nodes.node(16, 2, gpus=[nodes.gpu(0, 0), nodes.gpu(1, 1)])
    place = decide(topology, Wish(2, smt=smt)).places[0]
    assert format_cpus(place.compute or ()) == compute
    assert format_cpus(place.helpers or ()) == helpers
    assert place.cpus == (place.compute or frozenset()) | (place.helpers or frozenset())


def test_a_rank_never_gives_its_last_core_to_helpers() -> None:
    place = decide(nodes.node(2, 1), Wish(2, helpers=4)).places[0]
    assert place.compute
    assert not place.helpers


def test_slower_cores_are_dealt_evenly() -> None:
    topology = nodes.node(8, 1, threads=1)
    cores = tuple(Core(core.cpus, efficient=min(core.cpus) < 4) for core in topology.cores or ())
    plan = decide(replace(topology, cores=cores), Wish(2))
    assert [format_cpus(place.cpus or ()) for place in plan.places] == ["0-1,4-5", "2-3,6-7"]
    assert any("slower" in note for note in plan.notes)


def test_threads_of_one_core_stay_together_where_nobody_tells_which_they_are() -> None:
    gpus = tuple(Gpu(f"GPU{i}", i, cpus=parse_cpus("48-63,176-191"), numa=(3,)) for i in range(2))
    plan = decide(Topology(gpus=gpus), Wish(2))
    assert [format_cpus(place.cpus or ()) for place in plan.places] == ["48-55,176-183", "56-63,184-191"]
    assert any("not told" in note for note in plan.notes)


def test_cores_that_gpus_place_at_different_memory_nodes_are_at_none() -> None:
    gpus = tuple(Gpu(f"GPU{i}", i, cpus=parse_cpus("0-7"), numa=(i,)) for i in range(2))
    places = decide(Topology(gpus=gpus), Wish(2)).places
    assert [place.memory for place in places] == [(0,), (1,)]
    assert places[0].why["memory"] == "told as nearest to GPU0"


def test_what_tells_no_cpus_binds_none() -> None:
    place = decide(Topology(gpus=(Gpu("GPU0", 0),)), Wish(1)).places[0]
    assert place.cpus is None
    assert place.memory is None
    assert "no CPUs are told" in place.why["cores"]


# --- what may be used -----------------------------------------------------------------------------------------------


def test_a_gpu_whose_cores_may_not_be_used_gets_the_nearest_that_may() -> None:
    plan = decide(nodes.dgx_a100(), Wish(8, allowed=parse_cpus("0-31")))
    assert all(place.cpus and place.cpus <= parse_cpus("0-31") for place in plan.places)
    assert plan.places[2].cpus
    assert plan.places[2].cpus <= parse_cpus("16-31")
    assert "may not be used here" in plan.places[0].why["cores"]
    assert any("away from their GPU" in note for note in plan.notes)


def test_gpus_are_taken_within_what_is_visible() -> None:
    plan = decide(nodes.dgx_a100(), Wish(2, visible=("5", "GPU-00000006")))
    assert [place.units[0].name for place in plan.places] == ["GPU5", "GPU6"]
    assert plan.places[0].memory == (7,)


def test_more_ranks_than_cores_share_and_the_cost_is_said() -> None:
    plan = decide(nodes.node(2, 1, threads=1), Wish(5))
    assert all(place.cpus for place in plan.places)
    assert plan.crowded
    assert any("5 ranks on 2 cores" in note and "3 times as long" in note for note in plan.notes)


def test_more_ranks_than_gpus_share_by_neighbours() -> None:
    plan = decide(nodes.dgx_a100(), Wish(16))
    assert [place.units[0].name for place in plan.places] == [f"GPU{i // 2}" for i in range(16)]
    assert any("16 ranks share 8 GPUs" in note for note in plan.notes)


def test_without_gpus_it_does_not_matter_which_are_visible() -> None:
    assert decide(nodes.node(4, 1), Wish(2, 0, visible=("0", "9"))) == decide(nodes.node(4, 1), Wish(2, 0))


def test_several_gpus_of_a_rank() -> None:
    plan = decide(nodes.dgx_a100(), Wish(4, gpus=8))
    assert [[unit.name for unit in place.units] for place in plan.places][:2] == [["GPU0", "GPU1"], ["GPU2", "GPU3"]]


def test_ranks_without_gpus_are_spread_over_memory_nodes() -> None:
    plan = decide(nodes.mi250x(), Wish(4, gpus=0, cores_per_rank=8))
    assert [format_cpus(place.cpus or ()) for place in plan.places] == ["0-7", "16-23", "32-39", "48-55"]
    assert [place.memory for place in plan.places] == [(0,), (1,), (2,), (3,)]
    one = decide(nodes.mi250x(), Wish(1, gpus=0)).places[0]
    assert one.memory == (0, 1, 2, 3)


def test_cores_beyond_the_home_come_from_the_nearest_that_nobody_has() -> None:
    plan = decide(nodes.juwels_booster(), Wish(4, cores_per_rank=9))
    assert all(place.cores == 9 for place in plan.places)
    assert "more from memory node" in plan.places[0].why["cores"]
    assert plan.places[0].memory
    assert plan.places[0].memory[0] == 3


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(9, gpus=9), r"cluster\.gpus_per_node=9: 8 GPUs are visible"),
        (Wish(3, gpus=8), r"cluster\.tasks_per_node=3: 3 ranks can't have equal shares of 8 GPUs"),
        (Wish(1, allowed=parse_cpus("250-260")), r"CPUs 256-260 are outside"),
        (Wish(1, visible=("8",)), r"'8' is none of the 8 GPUs"),
        (Wish(1, reserved=frozenset(range(256))), r"no core is left"),
    ],
)
def test_a_wish_that_does_not_fit_is_refused(wish: Wish, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decide(nodes.dgx_a100(), wish)


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"ranks": 1, "smt": "two"}, {"ranks": 1, "reserve": "l2"}])
def test_a_wish_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"placement|cluster"):
        Wish(**wrong)  # type: ignore[arg-type]


# --- whatever the node ----------------------------------------------------------------------------------------------


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    numa = draw(st.integers(1, 4))
    cores = numa * draw(st.integers(1, 6))
    made = nodes.node(cores, numa, threads=draw(st.integers(1, 2)), l3=draw(st.sampled_from((None, 1, 2, 3))))
    places = st.one_of(st.none(), st.integers(0, numa - 1))
    near = draw(st.lists(places, max_size=6))
    gpus = tuple(Gpu(f"GPU{i}", i, numa=None if n is None else (n,)) for i, n in enumerate(near))
    nics = tuple(nodes.hca(f"mlx5_{i}", n) for i, n in enumerate(draw(st.lists(places, max_size=4))))
    allowed: CpuSet = draw(st.frozensets(st.sampled_from(sorted(made.existing or ())), min_size=1))
    return replace(made, gpus=gpus, nics=nics, allowed=allowed)


def check_plan(topology: Topology, wish: Wish, plan: NodePlan) -> None:
    usable = topology.usable_cpus() or frozenset()
    assert [place.local_rank for place in plan.places] == list(range(wish.ranks))
    for place in plan.places:
        assert place.cpus
        assert place.cpus <= usable - plan.reserved
        assert place.compute
        assert place.compute | (place.helpers or frozenset()) == place.cpus
        assert not place.compute & (place.helpers or frozenset())
        assert place.memory
        assert set(place.memory) <= {node.index for node in topology.numa or ()}
        assert bool(place.nics) == bool(topology.nics)
        assert wish.cores_per_rank is None or place.cores <= wish.cores_per_rank
    cores = {
        min(core.cpus & usable - plan.reserved) for core in topology.cores or () if core.cpus & usable - plan.reserved
    }
    assert plan.crowded == (wish.ranks > len(cores))
    if not plan.crowded:
        owners = [cpu for place in plan.places for cpu in place.cpus or ()]
        assert len(owners) == len(set(owners))
        seats = [topology.siblings(cpu) for cpu in owners]
        assert wish.smt != "one" or len(seats) == len(set(seats))


@settings(deadline=None, max_examples=80)
@given(
    topologies(),
    st.integers(1, 9),
    st.sampled_from(("one", "all", "spread")),
    st.one_of(st.none(), st.integers(1, 5)),
    st.sampled_from(((), (("tp", 2), ("shard", 4)), (("cp", 3), ("pp", 3)))),
)
def test_no_overlap_within_what_is_allowed_and_every_rank_is_served(
    topology: Topology, ranks: int, smt: str, cap: int | None, axes: Sequence[tuple[str, int]]
) -> None:
    wish = Wish(ranks, smt=smt, cores_per_rank=cap, axes=axes)
    plan = decide(topology, wish)
    check_plan(topology, wish, plan)
    assert decide(topology, wish) == plan


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
def test_nics_carry_even_loads(gpus: int, nics: int, numa: int) -> None:
    adapters = [nodes.hca(f"mlx5_{i}", 0) for i in range(nics)]
    topology = nodes.node(16 * numa, numa, gpus=[nodes.gpu(i, 0) for i in range(gpus)], nics=adapters)
    plan = decide(topology, Wish(gpus))
    loads = dict.fromkeys((nic.name for nic in adapters), 0)
    for place in plan.places:
        for choice in place.nics:
            loads[choice.nic.name] += 1
    assert len({len(place.nics) for place in plan.places}) == 1
    assert max(loads.values()) - min(loads.values()) <= 1


def test_a_nic_that_is_down_is_left_out_and_named() -> None:
    nics = [nodes.hca("mlx5_0", 0, state="down"), nodes.hca("mlx5_1", 0)]
    plan = decide(nodes.node(4, 1, gpus=[nodes.gpu(0, 0)], nics=nics), Wish(1))
    assert [choice.nic.name for choice in plan.places[0].nics] == ["mlx5_1"]
    assert "NIC mlx5_0 is down and not used" in plan.notes


def test_the_fabric_is_of_one_kind_and_never_the_slow_management_card() -> None:
    ethernet = Nic("mlx5_an0", "ethernet", numa=(0,), rdma=True, virtual=True, ports=nodes.hca("x").ports)
    nics = [ethernet, nodes.hca("mlx5_9", 0, rate=10.0), nodes.hca("mlx5_0", 0, rate=400.0)]
    plan = decide(nodes.node(4, 1, gpus=[nodes.gpu(0, 0)], nics=nics), Wish(1))
    assert [choice.nic.name for choice in plan.places[0].nics] == ["mlx5_0"]


def test_mig_instances_are_given_one_a_rank() -> None:
    parts = tuple(nodes.GpuPart("mig", i, uuid=f"MIG-{i}") for i in range(7))
    topology = nodes.node(16, 2, gpus=[replace(nodes.gpu(0, 1), parts=parts)])
    plan = decide(topology, Wish(7))
    assert [place.units[0].name for place in plan.places] == [f"GPU0/MIG{i}" for i in range(7)]
    assert all(place.memory == (1,) for place in plan.places)


def test_a_memory_node_without_cpus_is_no_home() -> None:
    topology = nodes.node(8, 2)
    extra = NumaNode(7, frozenset(), nodes.GIB)
    plan = decide(replace(topology, numa=(*(topology.numa or ()), extra)), Wish(2))
    assert [place.memory for place in plan.places] == [(0,), (1,)]
