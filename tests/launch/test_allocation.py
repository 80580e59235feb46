"""Fitting a run to the allocation at hand."""

from __future__ import annotations

from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.launch.allocation import fit
from dthpc.launch.request import Request, read_request
from tests.launch.sites import make_config

SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),2",
}


def request(**cluster: Any) -> Request:
    return read_request(make_config(kind="allocation", **cluster))


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [({"nodes": 2}, 2), ({"nodes": "1-9"}, 3), ({"nodes": "1-3", "tasks_per_node": 4}, 2), ({"nodes": 3}, 3)],
)
def test_as_many_nodes_as_are_asked_and_large_enough(cluster: dict[str, Any], nodes: int) -> None:
    fitted = fit(request(**cluster), SALLOC)
    assert (fitted.nodes, fitted.max_nodes) == (nodes, nodes)


def test_the_numbers_of_an_interactive_step_do_not_count() -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0"}
    assert fit(request(nodes=2), {**SALLOC, **step}).nodes == 2


@pytest.mark.parametrize(
    ("cluster", "env", "told"),
    [
        ({}, {}, "in no Slurm allocation"),
        ({"nodes": 4}, SALLOC, "the allocation 7 has 3 nodes"),
        ({"nodes": 3, "tasks_per_node": 2, "cpus_per_task": 2}, SALLOC, r"2 tasks of 2 cores.*8\(x2\),2.*2 of them"),
        ({"tasks_per_node": 9}, SALLOC, "0 of them"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(cluster: dict[str, Any], env: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        fit(request(**cluster), env)
