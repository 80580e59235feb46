"""What binding gives on this machine: two ranks bound to their own cores against both free, data loading included.

Each rank computes steps of a small network by one thread, averages gradients with the other over Gloo, and loads the
next batch in a thread meanwhile, as in training. Both ways are taken in turns, in fresh processes, so that what the
machine does besides falls on both. Printed: seconds of a step by either way, and their ratio (above 1: binding is
faster). On a machine that others use too, free ranks can evade them and bound ones can't: mind the load average.
Also: the CPU time of reading this node and deciding, and of a plan for 4,096 nodes.

    python benchmarks/placement.py [--rounds 5] [--steps 60] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dthpc.placement.apply import apply_settings, bind_helper, settings_of
from dthpc.placement.decide import decide
from dthpc.placement.plan.nodes import decide_nodes
from dthpc.placement.plan.wish import Wish
from dthpc.placement.read.live import read_live
from dthpc.placement.topology import Core, Gpu, Nic, NumaNode, Topology

RANKS = 2
WIDTH, BATCH, LAYERS = 384, 128, 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "PORT", "STEPS", "BOUND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, port, steps, bound = map(int, arguments.rank)
        print(run_rank(rank, port, steps, bool(bound)))
        return
    found = {**costs(), **compare(arguments.rounds, arguments.steps)}
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(f"{k:<28} {v:.4g}" for k, v in found.items()))


def compare(rounds: int, steps: int) -> dict[str, float]:
    """Seconds of a step by either way: the median over rounds, and of the ratios."""
    load = os.getloadavg()[0]
    pairs = [(measure(steps, False), measure(steps, True)) for _ in range(rounds)]
    free, bound = zip(*pairs, strict=True)
    return {
        "step free, s": statistics.median(free),
        "step bound, s": statistics.median(bound),
        "free / bound": statistics.median(f / b for f, b in pairs),
        "load average before": load,
        "spread free": max(free) / min(free),
        "spread bound": max(bound) / min(bound),
    }


def measure(steps: int, bound: bool) -> float:
    """Seconds of a step of both ranks in processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(port), str(steps), str(int(bound))],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(RANKS)
    ]
    return max(float(rank.communicate()[0].split()[-1]) for rank in ranks)


def run_rank(rank: int, port: int, steps: int, bound: bool) -> float:
    """Seconds of a step of this rank, after a few that warm it up."""
    if bound:
        plan = decide(read_live(tools=False), Wish(RANKS, gpus=0))
        apply_settings(settings_of(plan, rank, os.environ, threads=1))
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    pool = ThreadPoolExecutor(1, initializer=bind_helper)
    ahead = pool.submit(make_batch, 0)
    warm, start = max(3, steps // 10), 0.0
    for step in range(warm + steps):
        if step == warm:
            start = time.perf_counter()
        batch = ahead.result()
        ahead = pool.submit(make_batch, step + 1)
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad = None
    seconds = (time.perf_counter() - start) / steps
    ahead.result()
    pool.shutdown()
    dist.destroy_process_group()
    return seconds


def make_batch(step: int) -> object:
    """A batch, made from bytes as a tokenizer's would be."""
    import torch

    raw = torch.randint(0, 256, (BATCH * WIDTH,), dtype=torch.uint8, generator=torch.Generator().manual_seed(step))
    return raw.to(torch.float32).reshape(BATCH, WIDTH).div_(255).sub_(0.5)


def costs() -> dict[str, float]:
    """CPU seconds of reading this node and deciding, of deciding for a node of 8 GPUs, and for 4,096 of them."""
    before = time.process_time()
    decide(read_live(), Wish(RANKS, gpus=0))
    live = time.process_time() - before
    node = eight_gpus()
    wish = Wish(8, axes=(("tp", 2), ("shard", 4)))
    before = time.process_time()
    decide(node, wish)
    one = time.process_time() - before
    listed = [(f"n{i}", replace(node, host=f"n{i}")) for i in range(4096)]
    before = time.process_time()
    plan = decide_nodes(listed, wish)
    sum(1 for _ in plan.rows())
    many = time.process_time() - before
    return {"read and decide here, CPU s": live, "decide 8 GPUs, CPU s": one, "plan 4096 nodes, CPU s": many}


def eight_gpus() -> Topology:
    """Two packages of 64 cores and 128 threads, 8 memory nodes, 8 GPUs, 8 NICs."""
    cores = tuple(Core(frozenset({core, core + 128})) for core in range(128))
    every = frozenset(range(256))
    numa = tuple(
        NumaNode(i, frozenset().union(*(core.cpus for core in cores[16 * i : 16 * i + 16])), 64 << 30) for i in range(8)
    )
    gpus = tuple(Gpu(f"GPU{i}", i, numa=(i,)) for i in range(8))
    nics = tuple(Nic(f"mlx5_{i}", "infiniband", numa=(i,)) for i in range(8))
    return Topology(existing=every, allowed=every, numa=numa, cores=cores, gpus=gpus, nics=nics)


if __name__ == "__main__":
    main()
