"""Variables that name interfaces and devices: what they take, and which are refused with what to write instead."""

from __future__ import annotations

import pytest

from dthpc.comm.fabric.recognise import from_text
from dthpc.comm.fabric.settings import check_settings, matches
from tests.comm.fabric.texts import ETHER, LO, link, wired

NAMES = ["lo", "bond0", "bond0.7", "docker0", "eth0", "eth1"]
(NODE,) = from_text(
    LO
    + wired(2, "bond0", "10.0.0.1/24")
    + wired(3, "bond0.7@bond0", "10.7.0.1/24")
    + wired(4, "docker0", "172.17.0.1/16")
    + link(5, "eth1", ETHER, flags="<NO-CARRIER,BROADCAST,UP>", state="DOWN")
    + "mlx5_0 port 1 ==> eth0 (Up)\nmlx5_1 port 1 ==> eth1 (Down)\n",
    "n",
)


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("bond0", ["bond0", "bond0.7"]),
        ("=bond0", ["bond0"]),
        ("^docker0", ["lo", "bond0", "bond0.7", "eth0", "eth1"]),
        ("^=bond0,lo", ["bond0.7", "docker0", "eth0", "eth1"]),
        ("eth,bond0.", ["bond0.7", "eth0", "eth1"]),
        ("ib", []),
    ],
)
def test_nccl_takes_prefixes_whole_names_and_all_but_some(value: str, taken: list[str]) -> None:
    assert matches(value, NAMES) == taken


@pytest.mark.parametrize(
    ("name", "value", "severity", "told"),
    [
        ("GLOO_SOCKET_IFNAME", "bond0", None, ""),
        ("GLOO_SOCKET_IFNAME", "^lo,docker", "error", "one whole name"),
        ("GLOO_SOCKET_IFNAME", "bond0,eth1", "error", "one whole name"),
        ("GLOO_SOCKET_IFNAME", "=bond0", "error", "one whole name"),
        ("GLOO_SOCKET_IFNAME", "10.0.0.1", "error", "GLOO_SOCKET_IFNAME=bond0"),
        ("GLOO_SOCKET_IFNAME", "bond0:1", "error", "alias"),
        ("GLOO_SOCKET_IFNAME", "bond", "error", "no prefix"),
        ("GLOO_SOCKET_IFNAME", "bnod0", "error", "did you mean bond0"),
        ("GLOO_SOCKET_IFNAME", "docker0", "error", "container"),
        ("GLOO_SOCKET_IFNAME", "eth1", "error", "no carrier"),
        ("GLOO_SOCKET_IFNAME", "lo", "warning", "loopback"),
        ("NCCL_SOCKET_IFNAME", "=bond0", None, ""),
        ("NCCL_SOCKET_IFNAME", "^lo,docker,bond0.,eth", None, ""),
        ("NCCL_SOCKET_IFNAME", "bond0", "warning", "bond0.7"),
        ("NCCL_SOCKET_IFNAME", "^docker0", "warning", "lets lo back in"),
        ("NCCL_SOCKET_IFNAME", "docker", "error", "only what can't carry ranks"),
        ("NCCL_SOCKET_IFNAME", "ib", "error", "no interface matches"),
        ("NCCL_SOCKET_IFNAME", "10.0.0.9:23456", "error", "this is an address"),
        ("NCCL_IB_HCA", "mlx5_0:1", None, ""),
        ("NCCL_IB_HCA", "mlx5_9", "error", "no such device"),
        ("NCCL_IB_HCA", "=mlx5_1", "error", "no port is active"),
        ("UCX_NET_DEVICES", "mlx5_0", "error", "UCX_NET_DEVICES=mlx5_0:1"),
        ("UCX_NET_DEVICES", "mlx5_0:1", None, ""),
        ("UCX_NET_DEVICES", "bond0", None, ""),
        ("NCCL_IB_DISABLE", "1", "warning", "over TCP"),
        ("NCCL_IB_DISABLE", "0", None, ""),
        ("MASTER_ADDR", "127.0.0.1", "warning", "no other node"),
        ("MASTER_ADDR", "10.0.0.1", None, ""),
        ("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/24", None, ""),
    ],
)
def test_each_setting_is_accepted_or_told_what_to_write(name: str, value: str, severity: str | None, told: str) -> None:
    problems = check_settings({name: value}, NODE)
    assert [problem.severity for problem in problems] == ([severity] if severity else [])
    assert all(told in str(problem) and f"{name}={value}" in str(problem) for problem in problems)
