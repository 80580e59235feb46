from __future__ import annotations

from dataclasses import replace

from dthpc.placement.read.combine import combine
from dthpc.placement.topology import Core, Counts, Gpu, Link, Nic, NumaNode, Port, Source, Topology

ALL = frozenset(range(8))


def part(kind: str, **facts: object) -> Topology:
    return replace(Topology(**facts), sources=(Source(kind, f"{kind}.txt"),))  # type: ignore[arg-type]


KERNEL = part(
    "sysfs",
    existing=ALL,
    cores=(Core(ALL),),
    numa=(NumaNode(0, ALL, 1024),),
    gpus=(
        Gpu("0000:01:00.0", bus_id="0000:01:00.0", numa=(0,), cpus=ALL),
        Gpu("0000:02:00.0", bus_id="0000:02:00.0", numa=(1,)),
    ),
    nics=(Nic("mlx5_0", "infiniband", "0000:03:00.0", interfaces=("ib0",), ports=(Port(1, "active"),), rdma=True),),
)
QUERY = part("nvidia-smi csv", gpus=(Gpu("GPU0", 0, "0000:02:00.0", "GPU-b"),))
MATRIX = part(
    "nvidia-smi topo",
    gpus=(Gpu("GPU0", 0, numa=(0,)), Gpu("GPU1", 1, numa=(1,))),
    nics=(Nic("mlx5_0", rdma=True),),
    links=(Link("GPU0", "GPU1", kind="nvlink", lanes=4, said="NV4"), Link("GPU0", "mlx5_0", "PIX", said="PIX")),
)


def test_one_part_is_itself() -> None:
    assert combine([KERNEL]) is KERNEL


def test_a_gpu_is_known_again_by_its_bus_id_and_hidden_ones_are_told_from_shown_ones() -> None:
    merged = combine([QUERY, KERNEL])
    assert [(gpu.key, gpu.bus_id, gpu.uuid, gpu.numa, gpu.visible) for gpu in merged.gpus or ()] == [
        ("GPU0", "0000:02:00.0", "GPU-b", (1,), True),
        ("0000:01:00.0", "0000:01:00.0", None, (0,), False),
    ]
    assert [source.kind for source in merged.sources] == ["sysfs", "nvidia-smi csv"]


def test_bus_ids_and_numbers_meet_in_the_order_of_bus_ids_where_nothing_speaks_against_it() -> None:
    merged = combine([MATRIX, KERNEL])
    assert [(gpu.key, gpu.bus_id) for gpu in merged.gpus or ()] == [("GPU0", "0000:01:00.0"), ("GPU1", "0000:02:00.0")]
    assert "in the order of their bus ids" in merged.notes[0]
    assert merged.level(merged.gpu(0), merged.nic("mlx5_0")) == "PIX"
    [nic] = merged.nics or ()
    assert (nic.bus_id, nic.up) == ("0000:03:00.0", True)


def test_they_do_not_meet_where_memory_nodes_disagree() -> None:
    other = replace(MATRIX, gpus=(Gpu("GPU0", 0, numa=(1,)), Gpu("GPU1", 1, numa=(0,))))
    merged = combine([KERNEL, other])
    assert len(merged.gpus or ()) == 4
    assert any("cannot be matched" in note for note in merged.notes)


def test_the_better_source_wins_and_the_other_is_kept_as_a_conflict() -> None:
    lscpu = part(
        "lscpu", existing=frozenset(range(4)), numa=(NumaNode(0, frozenset(range(4))), NumaNode(1, frozenset()))
    )
    slurm = part("slurm node", counts=Counts(cpus=16, gpus=2))
    merged = combine([slurm, lscpu, KERNEL])
    assert merged.existing == ALL
    assert [node.cpus for node in merged.numa or ()] == [ALL, frozenset()]
    assert [str(conflict) for conflict in merged.conflicts] == [
        "existing CPUs: sysfs says 0-7 (kept), lscpu says 0-3",
        "CPUs of memory node 0: sysfs says 0-7 (kept), lscpu says 0-3",
        "number of cpus: what is listed says 8 (kept), what is counted says 16",
    ]


def test_cpus_near_a_gpu_that_are_of_another_memory_node_are_a_conflict() -> None:
    halves = (NumaNode(0, frozenset(range(4))), NumaNode(1, frozenset(range(4, 8))))
    numactl = part("numactl", numa=halves)
    for cpus, said in ((range(3, 8), ["CPUs nearest to GPU0"]), (range(4, 6), []), ((4, 9), [])):
        matrix = part("nvidia-smi topo", gpus=(Gpu("GPU0", 0, numa=(1,), cpus=frozenset(cpus)),))
        assert [conflict.what for conflict in combine([matrix, numactl]).conflicts] == said
    both = part("nvidia-smi topo", gpus=(Gpu("GPU0", 0, numa=(0, 1), cpus=ALL),))
    assert combine([both, numactl]).conflicts == ()


def test_devices_that_sources_describe_differently() -> None:
    one = part(
        "hwloc",
        gpus=(Gpu("GPU0", 0, "0000:01:00.0", numa=(0,), cpus=frozenset({0, 1})),),
        links=(Link("GPU0", "x", "PIX"),),
    )
    two = part("rocm-smi", gpus=(Gpu("GPU0", 0, "0000:09:00.0", numa=(1,), cpus=frozenset({1, 2})),))
    whats = [
        conflict.what
        for conflict in combine([one, replace(two, gpus=(replace((two.gpus or ())[0], bus_id=None),))]).conflicts
    ]
    assert whats == ["memory node of GPU0", "CPUs near GPU0"]
    # A tool that runs within a cgroup shows a part of the CPUs: that is no contradiction.
    within = part("rocm-smi", gpus=(Gpu("GPU0", 0, cpus=frozenset({1})),))
    assert combine([one, within]).conflicts == ()


def test_ports_of_an_adapter_are_filled_from_several_tools() -> None:
    shown = part("ibdev2netdev", nics=(Nic("mlx5_0", interfaces=("ib0",), ports=(Port(1, None),), rdma=True),))
    known = part("ibstat", nics=(Nic("mlx5_0", "infiniband", ports=(Port(1, "active", rate_gbps=400.0),), rdma=True),))
    [nic] = combine([shown, known]).nics or ()
    assert (nic.interfaces, nic.kind, nic.ports) == (("ib0",), "infiniband", (Port(1, "active", rate_gbps=400.0),))


def test_adapters_without_names_are_left_out_where_others_have_them() -> None:
    nameless = part("nvidia-smi topo", nics=(Nic("NIC0", rdma=True),), links=(Link("GPU0", "NIC0", "PIX"),))
    merged = combine([KERNEL, nameless])
    assert [nic.name for nic in merged.nics or ()] == ["mlx5_0"]
    assert merged.links == ()
    assert any("without names" in note for note in merged.notes)
