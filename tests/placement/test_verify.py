from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from dthpc.errors import UserError
from dthpc.placement import kernel
from dthpc.placement.apply import Settings
from dthpc.placement.plan.places import NicChoice, RankPlace, Unit
from dthpc.placement.topology import Nic
from dthpc.placement.verify import Verification, thread_masks, verify
from tests.placement import nodes

HERE = frozenset(os.sched_getaffinity(0))


def test_every_thread_is_looked_at() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    try:
        masks = thread_masks()
        assert thread.native_id in masks
        assert all(mask <= HERE for mask in masks.values())
    finally:
        go.set()
        thread.join()


def test_one_thread_elsewhere_is_found() -> None:
    go, ready = threading.Event(), threading.Event()
    one = {min(HERE)}

    def strayed() -> None:
        os.sched_setaffinity(0, one)
        ready.set()
        go.wait()

    thread = threading.Thread(target=strayed)
    thread.start()
    ready.wait()
    try:
        found = verify(RankPlace(0, cpus=HERE - one or frozenset({4095})), Settings())
        assert [finding.what for finding in found.mismatches] == ["threads"]
        with pytest.raises(UserError, match=r"placement\.strict.*does not run where it was placed"):
            found.demand()
        assert verify(RankPlace(0, cpus=HERE), Settings()).mismatches == []
    finally:
        go.set()
        thread.join()


def test_pages_from_another_node_than_expected_are_found() -> None:
    nodes_here = kernel.nodes_of_fresh_pages()
    right = verify(RankPlace(0), Settings(memory=tuple(nodes_here)))
    wrong = verify(RankPlace(0), Settings(memory=(1000,)))
    assert right.mismatches == []
    assert [finding.what for finding in wrong.mismatches] == ["memory"]
    assert "pages of node" in wrong.mismatches[0].found


def test_a_nic_that_is_not_there_is_found() -> None:
    place = RankPlace(0, nics=(NicChoice(Nic("mlx5_77", "infiniband"), "PIX"),))
    assert [finding.found for finding in verify(place, Settings()).mismatches] == ["no such device"]


def test_what_cannot_be_seen_is_no_mismatch() -> None:
    place = RankPlace(0, units=(Unit(replace(nodes.gpu(0, 0), bus_id=None)),))
    found = verify(place, Settings(kept={"NCCL_IB_HCA": "=mlx5_0"}), {"NCCL_IB_HCA": "mlx5_1"})
    assert [finding.holds for finding in found.findings] == [None, None]
    assert found.to_json()["holds"]
    assert "mlx5_1" in found.findings[1].found


def test_nothing_looked_at_holds() -> None:
    assert Verification(()).to_json() == {"holds": True, "findings": []}
    Verification(()).demand()
