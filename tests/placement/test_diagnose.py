from __future__ import annotations

from dataclasses import replace

from dthpc.placement.decide import decide
from dthpc.placement.diagnose import diagnose
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Conflict, Link, Port, Topology
from tests.placement import nodes


def whats(topology: Topology) -> list[str]:
    return [f"{problem.severity}: {problem.what}" for problem in diagnose(topology, decide(topology, Wish(1)))]


def test_a_sound_node_has_no_problem() -> None:
    for sound in (nodes.dgx_a100(), nodes.dgx_h100(), nodes.mi250x(), nodes.gh200(), nodes.juwels_booster()):
        assert diagnose(sound, decide(sound, Wish(4))) == []


def test_a_port_that_is_down_and_a_link_at_half_its_rate() -> None:
    topology = nodes.juwels_booster()
    first, second, *rest = topology.nics or ()
    down = replace(first, ports=(Port(1, "down", "polling", 10.0, "infiniband"),))
    slow = replace(second, ports=(Port(1, "active", "linkup", 100.0, "infiniband"),))
    assert whats(replace(topology, nics=(down, slow, *rest))) == [
        "warning: mlx5_0 is down (polling)",
        "warning: mlx5_1 runs at 100 Gbit/s, others of its kind at 200",
        "warning: GPU0 is on another memory node than any NIC",
    ]


def test_no_port_up_at_all_is_an_error() -> None:
    assert whats(nodes.node(2, 1, nics=[nodes.hca("mlx5_0", 0, state="down")])) == ["error: mlx5_0 is down"]


def test_gpus_far_from_every_nic_are_named() -> None:
    topology = nodes.polaris()
    plan = decide(topology, Wish(4))
    assert [problem.what for problem in diagnose(topology, plan)] == [
        "GPU0, GPU2 are on another memory node than any NIC"
    ]


def test_a_gpu_that_lost_links() -> None:
    lame = [replace(link, lanes=8) if "GPU3" in (link.a, link.b) else link for link in nodes.nvlinks(4, 12)]
    topology = nodes.node(16, 1, gpus=[nodes.gpu(i, 0) for i in range(4)], links=lame)
    assert whats(topology) == ["error: GPU3 has fewer NVLinks than the others"]


def test_a_gpu_that_fell_off_the_bus() -> None:
    topology = nodes.node(16, 1, gpus=[nodes.gpu(i, 0) for i in range(7)])
    assert whats(topology) == ["warning: 7 GPUs"]


def test_memory_that_is_missing() -> None:
    topology = nodes.node(8, 2)
    first, second = topology.numa or ()
    assert whats(replace(topology, numa=(first, replace(second, memory_bytes=0)))) == [
        "warning: memory node 1 has CPUs (4-7,12-15) and no memory"
    ]
    assert "differ in size" in whats(replace(topology, numa=(first, replace(second, memory_bytes=nodes.GIB))))[0]


def test_gpus_of_which_no_place_is_told_and_cpus_that_are_off() -> None:
    topology = nodes.node(8, 2, gpus=[replace(nodes.gpu(0, 0), numa=None)])
    found = whats(replace(topology, offline=frozenset({16})))
    assert found == ["note: of GPU0 no memory node is told", "note: CPUs 16 are switched off"]


def test_sources_that_disagree_are_told() -> None:
    conflict = Conflict("memory node of GPU0", "1", "sysfs", "0", "nvidia-smi topo")
    found = diagnose(replace(nodes.node(2, 1), conflicts=(conflict,), complete=False))
    assert "sysfs says 1 (kept)" in found[0].what
    assert "cut" in found[1].what


def test_every_problem_comes_with_its_fix() -> None:
    topology = replace(nodes.polaris(), offline=frozenset({99}), links=(Link("GPU0", "GPU1", "SYS"),))
    for problem in diagnose(topology):
        assert problem.why
        assert problem.fix
        assert problem.to_json()["fix"] == problem.fix


def test_distances_that_differ_by_direction_are_told_once() -> None:
    topology = nodes.node(2, 2)
    for there, back in ((21, 12), (12, 12)):
        rows = ({0: 10, 1: there}, {0: back, 1: 10})
        numa = [replace(each, distances=row) for each, row in zip(topology.numa or (), rows, strict=True)]
        told = [f"note: memory node 1 is {there} from node 0, and {back} the other way"] if there != back else []
        assert whats(replace(topology, numa=tuple(numa))) == told
