"""What the MPI process group costs over MPI itself, and what it gains over Gloo, in one run on this machine.

    python benchmarks/mpi_backend.py                    2 and 4 ranks, about two minutes
    python benchmarks/mpi_backend.py --ranks 2 --quick  fewer sizes and rounds
    python benchmarks/mpi_backend.py --only overlap     one part

It starts its ranks by the `mpiexec` beside the interpreter. All three (mpi4py on NumPy arrays, torch on the MPI group,
torch on Gloo) take turns in the same processes, so that a ratio compares like with like whatever else the machine does;
a figure is the lowest time of many rounds, in which all ranks start together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dthpc.comm.mpi import BACKEND, register
from dthpc.comm.mpi.runtime import load

SIZES = [8, 1024, 16384, 65536, 262144, 2**20, 2**22, 2**24, 2**26]
_RUNNING = 5
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
PARTS = (*KINDS, "data_parallel", "overlap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of it")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.store:
        Rank(given.store, given.quick).run(given.only)
        return
    for size in given.ranks:
        launch(size, given.quick, given.only)


def launch(size: int, quick: bool, only: Sequence[str]) -> None:
    """Run the measurement on some ranks."""
    launcher = Path(sys.executable).parent / "mpiexec"
    # Open MPI refuses by default what a measurement on one machine needs; MPICH does not read these.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mapping = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(launcher), "-n", str(size), sys.executable, __file__, "--store", f"{folder}/store"]
        options = [*(["--quick"] if quick else []), "--only", *only]
        subprocess.run([*command, *options], env={**os.environ, **allowed, **mapping}, check=True)


class Rank:
    """One rank's part of the measurement."""

    def __init__(self, store: str, quick: bool) -> None:
        from mpi4py import rc

        rc.finalize, rc.thread_level = False, "multiple"
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size, self.quick = self.comm.rank, self.comm.size, quick
        torch.set_num_threads(1)
        runtime = load(self.rank, self.size)
        register(runtime)
        dist.init_process_group(
            BACKEND,
            store=dist.FileStore(store, self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=120),
        )
        self.gloo: Any = dist.new_group(backend="gloo")
        self.library = runtime.library

    def run(self, only: Sequence[str]) -> None:
        """Measure some parts, and print."""
        self.say(f"\n{self.size} ranks on {os.cpu_count()} cores, {self.library}, torch {torch.__version__}")
        self.say("lowest times in µs; 'over raw' is what the group adds to the call of mpi4py\n")
        self.say(
            f"{'operation':15} {'bytes':>9} {'mpi4py':>9} {'group':>9} {'over raw':>17} {'Gloo':>9} {'Gloo/group':>10}"
        )
        for kind in (kind for kind in KINDS if kind in only):
            for nbytes in SIZES[:: 3 if self.quick else 1]:
                self.compare(kind, nbytes)
        if "data_parallel" in only:
            self.data_parallel()
        if "overlap" in only:
            self.overlap()
        dist.destroy_process_group()

    def say(self, text: str) -> None:
        """Print once."""
        if self.rank == 0:
            print(text, flush=True)

    # --- single operations ------------------------------------------------------------------------------------------

    def compare(self, kind: str, nbytes: int) -> None:
        """One line of the table."""
        calls = [self.raw(kind, nbytes), self.torch(kind, nbytes, None), self.torch(kind, nbytes, self.gloo)]
        rounds = (200 if nbytes < 2**18 else 80 if nbytes < 2**22 else 20 if nbytes < 2**24 else 10) // (
            2 if self.quick else 1
        )
        raw, group, gloo = (1e6 * seconds for seconds in self.lowest(calls, rounds))
        over = f"{group / raw:6.2f} × {group - raw:+7.1f}"
        self.say(f"{kind:15} {nbytes:9} {raw:9.1f} {group:9.1f} {over:>17} {gloo:9.1f} {gloo / group:10.2f}")

    def lowest(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
        """Lowest times of calls that take turns, each a few times running; the slowest rank's time counts."""
        return [float(row.min()) for row in self.times(calls, rounds)]

    def times(self, calls: Sequence[Callable[[], object]], rounds: int) -> Any:
        """All times, `[calls, rounds]`, likewise."""
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(max(2, rounds // _RUNNING)):
            for call, kept in zip(calls, times, strict=True):
                for again in range(_RUNNING):
                    self.comm.Barrier()
                    began = time.perf_counter()
                    call()
                    if again:  # the first finds the others' data in the caches
                        kept.append(time.perf_counter() - began)
        mine = np.array(times)
        slowest = np.empty_like(mine)
        self.comm.Allreduce(mine, slowest, self.mpi.MAX)
        return slowest

    def raw(self, kind: str, nbytes: int) -> Callable[[], object]:
        """The call of mpi4py on NumPy arrays."""
        comm, count, size = self.comm, max(nbytes // 4, self.size), self.size
        count = count // size * size
        # Over torch's memory, as NumPy's own has huge pages, which would be compared then.
        whole, other, share = (torch.ones(n).numpy() for n in (count, count, count // size))
        in_place, following, before = self.mpi.IN_PLACE, (self.rank + 1) % size, (self.rank - 1) % size
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.Allreduce(in_place, whole),
            "all_gather": lambda: comm.Allgather(share, whole),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, share),
            "broadcast": lambda: comm.Bcast(whole),
            "all_to_all": lambda: comm.Alltoall(whole, other),
            "send_recv": lambda: comm.Sendrecv(whole, following, recvbuf=other, source=before),
        }
        return calls[kind]

    def torch(self, kind: str, nbytes: int, group: Any) -> Callable[[], object]:
        """The call of torch on a group."""
        count, size = max(nbytes // 4, self.size), self.size
        count = count // size * size
        whole, other, share = torch.ones(count), torch.ones(count), torch.ones(count // size)
        following, before = (self.rank + 1) % size, (self.rank - 1) % size

        def send_recv() -> None:
            sent: Any = dist.isend(whole, following, group=group)
            dist.recv(other, before, group=group)
            sent.wait()

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_single(whole, share, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(share, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            "send_recv": send_recv,
        }
        return calls[kind]

    # --- training ---------------------------------------------------------------------------------------------------

    def data_parallel(self) -> None:
        """A step of DistributedDataParallel, less the same step without it."""
        batch = torch.randn(16, 768)

        def model() -> nn.Module:
            return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.ReLU())])

        def parallel(group: Any) -> nn.Module:
            # Gradients lie in the buckets: a copy of them all, the same for both, would hide the difference.
            return DistributedDataParallel(model(), process_group=group, gradient_as_bucket_view=True)

        steps = [_step(one, batch) for one in (model(), parallel(None), parallel(self.gloo))]
        times = self.times(steps, 6 if self.quick else 20)
        self.say("\nDDP, 8 layers of 2.4 MB")
        for name, row in (("least", times.min(axis=1)), ("median", np.median(times, axis=1))):
            alone, group, gloo = (float(seconds) for seconds in row)
            self.say(f"  {name} times: step alone {1e3 * alone:.1f} ms, on the group {1e3 * group:.1f}, on Gloo "
                     f"{1e3 * gloo:.1f}: overhead {(group - alone) / (gloo - alone):.2f} × Gloo's")  # fmt: skip

    def overlap(self) -> None:
        """How much of the communication is hidden behind computation that only sleeps."""
        self.say("\nOverlap, 16 times a sleep and then an all-reduce; the last can't be hidden:")
        for mib, sleep_s in ((8, 0.015), (25, 0.030)):  # DDP's buckets have 25 MiB
            self.hidden([torch.ones(mib << 18) for _ in range(16)], sleep_s)

    def hidden(self, tensors: list[Tensor], sleep_s: float) -> None:
        """The same with some tensors, each after a sleep."""

        def compute() -> None:
            for _ in tensors:
                time.sleep(sleep_s)

        def both(group: Any) -> None:
            works: list[Any] = []
            for tensor in tensors:
                time.sleep(sleep_s)
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
            for work in works:
                work.wait()

        def talk(group: Any) -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

        size = f"{tensors[0].nbytes >> 20} MiB after {1e3 * sleep_s:.0f} ms"
        for name, group in (("the group", None), ("Gloo", self.gloo)):
            calls = [compute, lambda g=group: both(g), lambda g=group: talk(g)]
            alone, together, only = (1e3 * seconds for seconds in self.lowest(calls, 5 if self.quick else 10))
            hidden = 100 * (1 - (together - alone) / only)
            self.say(f"  {size}, {name}: sleep {alone:.1f} ms, with communication {together:.1f}, that alone "
                     f"{only:.1f}: {hidden:.0f} % hidden")  # fmt: skip


def _step(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).sum().backward()

    return step


if __name__ == "__main__":
    main()
