from __future__ import annotations

from dataclasses import replace

import pytest

from dthpc.errors import UserError
from dthpc.placement.decide import decide
from dthpc.placement.plan.sound import contradictions
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Core, Gpu, NumaNode, Topology
from tests.placement import nodes

NODE = nodes.node(4, 2)  # memory node 0: CPUs 0-1 and 4-5
FIRST, SECOND = NODE.numa or ()


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (replace(NODE, numa=(FIRST, NumaNode(1, frozenset({1, 2})))), "CPU 1 is in the memory nodes 0 and 1"),
        (replace(NODE, numa=(FIRST, replace(SECOND, index=0))), "two memory nodes are called 0"),
        (replace(NODE, cores=(Core(frozenset({0, 1})), Core(frozenset({1, 2})))), "CPU 1 is in the cores 0-1 and 1-2"),
        (replace(NODE, gpus=(nodes.gpu(0, 5),)), "GPU0 is near to memory node 5, and the nodes are 0, 1"),
        (replace(NODE, gpus=(nodes.gpu(0, 0), nodes.gpu(0, 1))), "two GPUs are called GPU0"),
        (
            replace(NODE, gpus=(Gpu("GPU0", 0, numa=(0,), cpus=frozenset({2, 3})),)),
            "GPU0 is near to CPUs 2-3 and to memory node 0, which has CPUs 0-1,4-5",
        ),
    ],
)
def test_what_cannot_be_is_refused(topology: Topology, message: str) -> None:
    with pytest.raises(UserError, match=f"contradicts itself: {message}"):
        decide(topology, Wish(1))


def test_two_kinds_of_memory_near_to_the_same_cpus_are_none() -> None:
    assert list(contradictions(replace(NODE, numa=(FIRST, SECOND, replace(SECOND, index=3))))) == []


def test_documented_nodes_are_sound() -> None:
    for build in (nodes.dgx_a100, nodes.mi250x, nodes.gh200, nodes.summit, nodes.aurora, nodes.juwels_booster):
        assert list(contradictions(build())) == []
