"""What a configuration asks of the machine, as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dthpc.errors import UserError, UserErrors
from dthpc.launch.request import parse_nodes, read_request, try_request
from tests.launch.sites import make_config


@pytest.mark.parametrize(("value", "bounds"), [(3, (3, 3)), ("3", (3, 3)), ("2-4", (2, 4)), (" 2 - 4 ", (2, 4))])
def test_nodes(value: Any, bounds: tuple[int, int]) -> None:
    assert parse_nodes(value) == bounds


@pytest.mark.parametrize("value", [0, "0-2", "4-2", "two", "", "1-", 1.5, None, True, "-1"])
def test_nodes_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"cluster\.nodes"):
        parse_nodes(value)


def test_a_request_in_numbers() -> None:
    request = read_request(
        make_config(
            nodes="2-3", tasks_per_node=2, cpus_per_task=3, gpus_per_task=2, time="1:30", memory="2G", exclude="n[1-2]"
        )
    )
    assert (request.nodes, request.max_nodes, request.nodes_text, request.ranks) == (2, 3, "2-3", 4)
    assert (request.cpus_per_node, request.gpus_per_node, request.memory_mb) == (6, 4, 2048)
    assert request.time_s == 120, "Slurm rounds up to minutes"
    assert request.exclude == ["n1", "n2"]
    assert math.isinf(read_request(make_config(time="UNLIMITED")).time_s)


def test_all_mistakes_are_told_together() -> None:
    config = make_config(nodes=0, time="soon", memory="1.5G", nodelist="n[1", exclude=" ")
    with pytest.raises(UserErrors) as caught:
        read_request(config)
    keys = [error.key for error in caught.value.errors]
    assert keys == ["cluster.nodes", "cluster.time", "cluster.memory", "cluster.nodelist", "cluster.exclude"]


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"memory": "1G", "memory_per_cpu": "1G"}, "cluster.memory_per_cpu"),
        ({"nodes": 2, "nodelist": "n[1-2]", "exclude": "n2"}, "cluster.exclude"),
        ({"nodes": 1, "nodelist": "n[1-2]"}, "cluster.nodelist"),
        ({"kind": "local", "nodes": 2}, "cluster.nodes"),
    ],
)
def test_contradictions(cluster: dict[str, Any], key: str) -> None:
    _, errors = try_request(make_config(**cluster))
    assert [error.key for error in errors] == [key]
