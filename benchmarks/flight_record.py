"""What the flight record adds to a call of `torch.distributed`, over Gloo on this machine.

    python benchmarks/flight_record.py [--ranks 2] [--repeats 12] [--calls 300]

Each rank is a process of one thread. An all-reduce of four numbers is made in turns with the record and without, in the
same processes, so that whatever else the machine does hits both alike. What counts is the processor time of the thread
that calls: the time that it waits for others is not the record's. The second part leaves the communication out:
one recorded call of a method that does nothing, with the wait for its result.

Prints medians and bests over the repeats in microseconds, and the ratio; the target is at most 5 µs a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dthpc.comm.watchdog.hooks import Hooks
from dthpc.comm.watchdog.recorder import Recorder


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments, f"{folder}/store"), arguments.ranks)


def measure(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """One rank: time both kinds in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    tensor = torch.ones(4)
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    for _ in range(arguments.repeats):
        for kind, seen in times.items():
            hooks = Hooks(Recorder(1000)) if kind == "recorded" else None
            dist.barrier()
            seen.append(per_call(lambda: dist.all_reduce(tensor), arguments.calls))
            if hooks is not None:
                hooks.remove()
    own = [cost_alone(tensor) for _ in range(arguments.repeats)]
    if rank == 0:
        plain, recorded = (statistics.median(times[kind]) for kind in ("plain", "recorded"))
        best = min(times["recorded"]) / min(times["plain"])
        print(f"all_reduce of 16 B, {arguments.ranks} ranks: plain {plain:.1f} µs, recorded {recorded:.1f} µs")
        print(f"ratio {recorded / plain:.3f}, of the best {best:.3f}")
        print(f"the record of one call and of its wait, alone: {min(own):.2f} µs (median {statistics.median(own):.2f})")
    dist.barrier()
    dist.destroy_process_group()


def cost_alone(tensor: torch.Tensor) -> float:
    """Microseconds that recording adds to a call and a wait which do nothing."""
    recorder = Recorder(1000)
    hooks, group = Hooks(recorder), dist.group.WORLD
    work = dist.all_reduce(tensor.clone(), async_op=True)
    assert work is not None
    work.wait()

    def nothing(self: Any, *arguments: Any) -> Any:
        return work

    def ended(self: Any) -> bool:
        return True

    call, wait = hooks._recorded("allreduce", nothing), hooks._waited(ended)
    recorded = per_call(lambda: wait(call(group, [tensor], None)), 20_000)
    plain = per_call(lambda: ended(nothing(group, [tensor], None)), 20_000)
    hooks.remove()
    return recorded - plain


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of this thread."""
    begun = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begun) / calls * 1e6


if __name__ == "__main__":
    main()
