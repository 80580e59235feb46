from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.placement.apply import Settings, apply_settings, settings_of, srun_binding
from dthpc.placement.cpuset import parse_cpus
from dthpc.placement.decide import decide
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Nic, Port
from tests.placement import nodes

SCRIPT = Path(__file__).with_name("bound_rank.py")


def bound(ranks: int, rank: int, **env: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [sys.executable, str(SCRIPT), str(ranks), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, env={**clean, **env}, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_ranks_threads_and_children_run_where_they_were_placed() -> None:
    cores = len(os.sched_getaffinity(0))
    ranks = [bound(2, rank) for rank in range(2)]
    for told in ranks:
        assert told["problems"] == []
        # The main thread, one from before the binding, one from after it.
        assert told["threads"] == [told["place"]] * 3
        assert frozenset(told["child"]) == parse_cpus(told["place"])
        assert set(told["helper"]) <= set(told["child"])
        assert told["verified"]["holds"]
        assert {finding["what"] for finding in told["verified"]["findings"]} >= {"threads", "memory"}
        assert told["policy"]
    assert cores < 2 or not set(ranks[0]["child"]) & set(ranks[1]["child"])


def test_what_was_exported_wins_and_is_told() -> None:
    plan = decide(nodes.dgx_a100(), Wish(8))
    settings = settings_of(plan, 3, {"OMP_NUM_THREADS": "7", "NCCL_IB_HCA": "mlx5_9"})
    assert settings.kept == {"OMP_NUM_THREADS": "6", "NCCL_IB_HCA": "=mlx5_3"}
    assert not {"OMP_NUM_THREADS", "NCCL_IB_HCA"} & set(settings.environment)
    assert settings.environment["UCX_NET_DEVICES"] == "mlx5_3:1"
    assert bound(2, 0, OMP_NUM_THREADS="5")["omp"] == "5"


def test_gpus_are_named_by_what_means_the_same_everywhere() -> None:
    plan = decide(nodes.dgx_a100(), Wish(8))
    environment = settings_of(plan, 6, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000006"
    nameless = replace(nodes.dgx_a100(), gpus=tuple(replace(nodes.gpu(i, 0), uuid=None) for i in range(8)))
    environment = settings_of(decide(nameless, Wish(8)), 6, {}).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert settings_of(decide(nodes.mi250x(), Wish(8)), 6, {}).environment["ROCR_VISIBLE_DEVICES"] == "6"
    assert settings_of(decide(nodes.aurora(), Wish(12)), 3, {}).environment["ZE_AFFINITY_MASK"] == "1.1"


def test_what_counts_within_the_visible_gpus_of_amd_counts_anew() -> None:
    plan = decide(nodes.mi250x(), Wish(2, gpus=4, visible=("4", "5", "6", "7")))
    told = settings_of(plan, 1, {"HIP_VISIBLE_DEVICES": "4,5,6,7"})
    visible = {name: value for name, value in told.environment.items() if "VISIBLE" in name}
    assert visible == {"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "0,1"}
    assert told.kept == {}


def test_slingshot_gets_the_map_of_its_mpi() -> None:
    environment = settings_of(decide(nodes.mi250x(), Wish(8)), 5, {}).environment
    assert environment["MPICH_OFI_NIC_POLICY"] == "USER"
    assert environment["MPICH_OFI_NIC_MAPPING"] == "0:0-1;1:2-3;2:4-5;3:6-7"
    assert "NCCL_IB_HCA" not in environment
    by_gpu = replace(decide(nodes.mi250x(), Wish(8)), by_gpu=True)
    mpich = {name: value for name, value in settings_of(by_gpu, 5, {}).environment.items() if "MPICH" in name}
    assert mpich == {"MPICH_OFI_NIC_POLICY": "NUMA"}


def test_interfaces_are_left_to_what_all_nodes_decide_together() -> None:
    topology = nodes.juwels_booster()
    nics = tuple(replace(nic, interfaces=(f"ib{i}",)) for i, nic in enumerate(topology.nics or ()))
    for some, links in ((nics, topology.links), (nics[:1], ())):
        environment = settings_of(decide(replace(topology, nics=some, links=links), Wish(4)), 0, {}).environment
        assert not [name for name in environment if name.endswith("_IFNAME")]


def test_ports_of_a_card_with_two_are_named() -> None:
    card = Nic("mlx4_0", "infiniband", rdma=True, ports=(Port(1, "active"), Port(2, "active")))
    down = replace(card, ports=(Port(1, "down"), Port(2, "active")))
    for nic, hca in ((card, "=mlx4_0:1,mlx4_0:2"), (down, "=mlx4_0:2")):
        plan = decide(nodes.node(2, 1, gpus=[nodes.gpu(0, 0)], nics=[nic]), Wish(1))
        assert settings_of(plan, 0, {}).environment["NCCL_IB_HCA"] == hca


def test_a_name_that_stands_only_in_a_text_is_not_exported() -> None:
    plan = decide(nodes.node(2, 1, gpus=[nodes.gpu(0, 0)], nics=[Nic("NIC0", numa=(0,))]), Wish(1))
    assert "NCCL_IB_HCA" not in settings_of(plan, 0, {}).environment


def test_srun_binds_by_masks_in_the_order_of_local_ranks() -> None:
    plan = decide(nodes.polaris(), Wish(4))
    assert srun_binding(plan) == [
        "--cpu-bind=mask_cpu:0xff000000,0xff0000,0xff00,0xff",
        "--mem-bind=prefer,mask_mem:0x8,0x4,0x2,0x1",
    ]
    assert srun_binding(plan, "bind")[1] == "--mem-bind=mask_mem:0x8,0x4,0x2,0x1"
    assert len(srun_binding(plan, "none")) == 1


def test_omp_places_are_the_computing_cpus() -> None:
    plan = decide(nodes.polaris(), Wish(4, cores_per_rank=3, helpers=1))
    environment = settings_of(plan, 3, {}, omp_bind="close").environment
    assert environment["OMP_PLACES"] == "{0},{1}"
    assert environment["DTHPC_HELPER_CPUS"] == "2"
    assert "OMP_PLACES" not in settings_of(plan, 3, {}).environment


def test_where_srun_binds_the_rank_does_not() -> None:
    settings = settings_of(decide(nodes.polaris(), Wish(4)), 0, {}, bind=False)
    assert settings.affinity is None
    assert settings.memory is None


def test_what_cannot_be_set_is_told() -> None:
    before = os.sched_getaffinity(0)
    problems = apply_settings(Settings(affinity=frozenset({4095}), memory=(900,)), {})
    assert len(problems) == 2
    assert "CPUs 4095 can't be bound to" in problems[0]
    assert "memory node 900" in problems[1]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("wrong", [{"memory": "local"}, {"omp_bind": "true"}])
def test_policies_that_do_not_exist_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"placement\."):
        settings_of(decide(nodes.polaris(), Wish(4)), 0, {}, **wrong)  # type: ignore[arg-type]
