from __future__ import annotations

from dthpc.placement.problem import Problem, gravest_first

PORT = Problem("warning", "mlx5_0 is down", "no rank can send over it", "check its cable")
NAME = Problem("error", "NCCL_SOCKET_IFNAME=eth9", "no interface matches", "=eth0", "n1", "NCCL_SOCKET_IFNAME")


def test_the_node_stands_where_there_is_one() -> None:
    assert PORT.lines() == ["warning: mlx5_0 is down: no rank can send over it", "  fix: check its cable"]
    assert str(NAME) == "error: NCCL_SOCKET_IFNAME=eth9 (n1): no interface matches. Instead: =eth0"


def test_only_what_is_known_is_told_as_json() -> None:
    assert set(PORT.to_json()) == {"severity", "what", "why", "fix"}
    assert NAME.to_json()["setting"] == "NCCL_SOCKET_IFNAME"


def test_errors_come_first() -> None:
    assert gravest_first([PORT, NAME, PORT]) == [NAME, PORT, PORT]
