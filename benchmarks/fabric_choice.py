"""What choosing the backend and the interfaces adds to a start, in CPU time.

    python -m benchmarks.fabric_choice

One rank's part: reading the node's network from the kernel, finding the facts of the backend's choice, deciding. Then
what rank 0 does for all nodes, over torch's store as in a run: reading their facts, deciding, writing the plans; for
nodes in shared subnets, and for nodes that each have subnets of their own, as in routed fabrics. CPU seconds of this
process, the store's threads among them, smallest of several; the baseline of the ratio is `import torch`, which every
start pays too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dthpc.comm.backend import choose, wanted_of
from dthpc.comm.evidence import find_facts
from dthpc.comm.fabric.live import read_network
from dthpc.comm.fabric.model import FabricDevice, IfAddress, Interface, NodeNetwork
from dthpc.comm.fabric.settle import Request, collect, decide_for, publish, tell
from dthpc.placement.topology import Nic, Port

RAILS = 4


def big_node(number: int, routed: bool) -> NodeNetwork:
    """A node of four rails of InfiniBand, Ethernet, and what a container engine adds.

    Args:
        number: of the node.
        routed: whether its rails are in subnets of its own.
    """
    import ipaddress

    high, low = divmod(number + 1, 250)
    flags = ("BROADCAST", "MULTICAST", "UP", "LOWER_UP")

    def interface(name: str, address: str, prefix: int, link: str = "ether") -> Interface:
        held = (IfAddress(ipaddress.ip_address(address), prefix),)
        return Interface(name, flags, link, "UP", addresses=held)

    made = [interface("lo", "127.0.0.1", 8, "loopback"), interface("eno1", f"10.0.{high}.{low}", 16)]
    prefix = 31 if routed else 16
    made += [interface(f"ib{rail}", f"10.{rail + 1}.{high}.{low}", prefix, "infiniband") for rail in range(RAILS)]
    made += [interface("docker0", "172.17.0.1", 16)]
    port = Port(1, "active", "linkup", 400.0, "infiniband")
    cards = tuple(FabricDevice(Nic(f"mlx5_{rail}", "infiniband", rdma=True, ports=(port,))) for rail in range(RAILS))
    return NodeNetwork(f"n{number:04d}", {each.name: each for each in made}, cards, live=True)


def cpu_ms(function: Callable[[], object], repeats: int) -> float:
    """Least CPU time of a call, in ms."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        function()
        best = min(best, time.process_time() - began)
    return best * 1e3


def import_torch_ms() -> float:
    code = "import time; began = time.process_time(); import torch; print(time.process_time() - began)"
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    return min(took) * 1e3


def one_rank() -> None:
    comm = SimpleNamespace(backend="auto", axes=None)
    choose(wanted_of(comm), find_facts("cpu", 8, 2, {"PMI_RANK": "0"}))
    read_network()


def rank_0(store: Any, hosts: dict[str, str]) -> None:
    settled = decide_for(collect(store, hosts), "id0", Request(libraries=frozenset({"gloo", "nccl"})))
    publish(store, settled)


def told_store(count: int, routed: bool) -> tuple[Any, dict[str, str]]:
    """A store to which all nodes have told their facts, and the nodes' names by identity."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosts = {f"id{number}": f"n{number:04d}" for number in range(count)}
    for number, node in enumerate(hosts):
        tell(store, node, big_node(number, routed))
    return store, hosts


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of choosing the backend and the network.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 128, 1024, 4096])
    arguments = parser.parse_args()
    baseline = import_torch_ms()
    print(f"baseline: import torch {baseline:.0f} ms of CPU")
    mine = cpu_ms(one_rank, 10)
    print(f"one rank: facts, choice and reading the network {mine:.1f} ms, {mine / baseline:.4f} of the baseline")
    for routed in (False, True):
        for count in arguments.nodes:
            store, hosts = told_store(count, routed)
            took = cpu_ms(lambda store=store, hosts=hosts: rank_0(store, hosts), 5)  # type: ignore[misc]
            where = "in subnets of their own" if routed else "in shared subnets"
            print(f"rank 0, {count:4d} nodes {where}: {took:.1f} ms, {took / baseline:.3f} of the baseline")


if __name__ == "__main__":
    main()
