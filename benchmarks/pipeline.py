"""How close a step of each pipeline schedule comes to its theoretical time, beside torch.distributed.pipelining.

    python benchmarks/pipeline.py [--ranks 4 8] [--repeats 10] [--only 1f1b] [--skip-memory] [--realtime]

Stages sleep instead of computing: each rank's layers take 10 ms forward and 20 ms backward (10 for the gradient of the
input, 10 for those of the weights, where a schedule parts them), so that time beyond theory is the runtime's own, and
more ranks than cores can be measured. Theory is `dthpc.parallel.pipeline.theory.simulate` with free
communication. Both sides run the same sleeping module, in the same processes, in turns; the least time of all repeats
counts, of the rank that takes longest.

A "bare exchange" runs beside them: the schedule's sleeps and messages in a plain loop over sockets, without tensors or
a graph. It is as near to theory as this machine comes: the rest is sleeps that end late, and waking whoever waits.
"With passes", the same loop calls the sleeping module forward and backward by autograd instead of sleeping itself:
nearer no runtime can come that calls such a module at all. `benchmarks/pipeline_trace.py` takes the time beyond theory
apart.

`--realtime` (as root) runs the ranks before all other programs, on a machine that others keep busy.

Targets: at most 1.03 times theory for gpipe, 1f1b and interleaved; zb_h1 and zbv below the theoretical time of 1f1b.

Then it measures the memory that GPipe and 1F1B take for activations of real layers, from the processes' resident sets:
theory has m micro-batches for GPipe, and on rank r of p at most p - r for 1F1B.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.runtime import execute
from dthpc.parallel.pipeline.schedule import Action, Kind, build
from dthpc.parallel.pipeline.theory import simulate
from dthpc.parallel.pipeline.verify import made_by, needs
from dthpc.parallel.pipeline.weights import WeightStore
from dthpc.parallel.pipeline.wires import connect
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker

FORWARD, INPUT, WEIGHT = 0.010, 0.010, 0.010
ROWS, WIDTH = 2, 2048
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2)]
TARGET = 1.03


class Sleep(torch.autograd.Function):
    """Takes its time in both directions; the weights' part of the backward pass is left out while `store` takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float, store: WeightStore | None) -> Tensor:
        started = time.perf_counter()
        ctx.share, ctx.store = share, store
        output = torch.empty_like(x)
        sleep_until(started + FORWARD * share)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        started = time.perf_counter()
        deferring = ctx.store is not None and ctx.store.deferring
        # torch.distributed.pipelining takes no gradients that are expanded.
        result = gradient.contiguous()
        sleep_until(started + (INPUT + (0 if deferring else WEIGHT)) * ctx.share)
        return result, None, None, None


def sleep_until(moment: float) -> None:
    """Return at that time of `perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter()))


class SleepingStage(nn.Module):
    """Stands for a chunk of layers."""

    def __init__(self, share: float = 1.0, store: WeightStore | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.share, self.store = share, store

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x, self.weight, self.share, self.store)
        return result


class SleepingWorker(ModuleWorker):
    """The worker that trains, with a weight gradient that sleeps."""

    def weight_backward(self, stage: int, micro_batch: int) -> None:
        super().weight_backward(stage, micro_batch)
        time.sleep(WEIGHT * self._chunks[stage].share)


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """A loss that takes no time."""
    return outputs.sum(), len(targets)


def theory(name: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """Seconds of a step on machines where nothing but the passes takes time."""
    costs = (FORWARD / chunks, INPUT / chunks, WEIGHT / chunks)
    return simulate(build(name, ranks, chunks, micro_batches), *costs).makespan


def ours(rank: int, name: str, ranks: int, chunks: int, micro_batches: int) -> Callable[[], None]:
    """One step of this package."""
    schedule = build(name, ranks, chunks, micro_batches)
    actions = schedule.actions[rank]
    store = WeightStore() if any(action.kind is Kind.W for action in actions) else None
    stages = {stage: SleepingStage(1 / chunks, store) for stage in schedule.stages_of(rank)}
    worker = SleepingWorker(stages, schedule.stages, loss, store=store)
    links = Links(schedule, dist.group.WORLD, torch.device("cpu"))
    batches = [MicroBatch(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS), ROWS)] * micro_batches

    def step() -> None:
        worker.begin(batches, actions)
        execute(actions, worker, links)

    return step


def torchs(rank: int, name: str, ranks: int, chunks: int, micro_batches: int) -> Callable[[], None] | None:
    """One step of torch.distributed.pipelining; None for schedules that are not compared."""
    from torch.distributed import pipelining

    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    if name not in kinds:
        return None
    stage = pipelining.PipelineStage(SleepingStage(), rank, ranks, torch.device("cpu"))
    runner: Any = kinds[name](stage, micro_batches, loss_fn=lambda outputs, targets: loss(outputs, targets)[0])
    inputs, targets = torch.zeros(ROWS * micro_batches, WIDTH), torch.zeros(ROWS * micro_batches)

    def step() -> None:
        arguments = (inputs,) if rank == 0 else ()
        runner.step(*arguments, **({"target": targets} if rank == ranks - 1 else {}))

    return step


def sleeper(chunks: int) -> Callable[[Action], None]:
    """Takes the time of an action."""
    costs = {Kind.F: FORWARD, Kind.B: INPUT + WEIGHT, Kind.I: INPUT, Kind.W: WEIGHT}
    return lambda action: time.sleep(costs[action.kind] / chunks)


def passes(chunks: int) -> Callable[[Action], None]:
    """Runs the sleeping module in an action, forward or backward."""
    stage, gradient = SleepingStage(1 / chunks), torch.ones(ROWS, WIDTH)
    held: dict[tuple[int, int], Tensor] = {}

    def run(action: Action) -> None:
        if action.kind is Kind.F:
            held[action.stage, action.micro_batch] = stage(torch.empty(ROWS, WIDTH).requires_grad_())
        else:
            held.pop((action.stage, action.micro_batch)).backward(gradient)  # type: ignore[no-untyped-call]

    return run


def bare_with_passes(rank: int, name: str, ranks: int, chunks: int, micro_batches: int) -> Callable[[], None] | None:
    """One step of the bare exchange around passes; None where they are parted."""
    return None if name.startswith("zb") else bare(rank, name, ranks, chunks, micro_batches, passes)


def bare(
    rank: int,
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    compute: Callable[[int], Callable[[Action], None]] = sleeper,
) -> Callable[[], None]:
    """One step of the bare exchange."""
    schedule = build(name, ranks, chunks, micro_batches)
    run = compute(chunks)
    takers: dict[Action, int] = {}
    for other in range(ranks):
        for action in schedule.actions[other]:
            if (need := needs(schedule, action)) is not None and schedule.rank_of(need.stage) != other:
                takers[need] = other
    plan = [(action, needs(schedule, action), made_by(action)) for action in schedule.actions[rank]]
    here = {need: schedule.rank_of(need.stage) for _, need, _ in plan if need in takers and takers[need] == rank}
    there = {made: takers[made] for _, _, made in plan if made in takers}
    numbers = {message: number for number, message in enumerate(sorted(takers, key=str))}
    sockets = connect(dist.group.WORLD, {*here.values(), *there.values()})
    for one in sockets.values():
        one.setblocking(True)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    inbox, outbox = bytearray(8 + 4 * ROWS * WIDTH), bytearray(8 + 4 * ROWS * WIDTH)

    def step() -> None:
        come: set[int] = set()
        for action, need, made in plan:
            while need in here and numbers[need] not in come:
                sockets[here[need]].recv_into(inbox)
                come.add(int.from_bytes(inbox[:8], "little"))
            run(action)
            if made in there:
                outbox[:8] = numbers[made].to_bytes(8, "little")
                sockets[there[made]].send(outbox)

    return step


MEASURED = (ours, torchs, bare, bare_with_passes)


def timed(step: Callable[[], None]) -> float:
    """Seconds of a step, of the rank that takes longest."""
    dist.barrier()
    started = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def measure_times(rank: int, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each schedule and number of micro-batches."""
    rows = []
    for name, chunks in SCHEDULES:
        for micro_batches in (ranks, 4 * ranks):
            if options.only and name not in options.only:
                continue
            steps = [make(rank, name, ranks, chunks, micro_batches) for make in MEASURED]
            times: list[list[float]] = [[] for _ in steps]
            for repeat in range(options.repeats + 1):
                for mine, step in zip(times, steps, strict=True):
                    if step is not None and (took := timed(step)) and repeat:
                        mine.append(took)
            least = [min(mine) if mine else None for mine in times]
            middle = statistics.median(times[0])
            expected, plain = theory(name, ranks, chunks, micro_batches), theory("1f1b", ranks, 1, micro_batches)
            rows.append(
                {
                    "schedule": name,
                    "ranks": ranks,
                    "micro_batches": micro_batches,
                    "theory_ms": round(expected * 1e3, 2),
                    "ours_ms": round(least[0] * 1e3, 2),
                    "ours_over_theory": round(least[0] / expected, 4),
                    "ours_median_over_theory": round(middle / expected, 4),
                    "bare_over_theory": round(least[2] / expected, 4),
                    "bare_with_passes_over_theory": round(least[3] / expected, 4) if least[3] else None,
                    "torch_over_theory": round(least[1] / expected, 4) if least[1] else None,
                    "over_1f1b_theory": round(least[0] / plain, 4),
                }
            )
    return rows


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watched(ModuleWorker):
    """Notes the process's size after each forward pass."""

    sizes_seen: tuple[int, ...] = ()

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        output = super().forward(stage, micro_batch, x)
        self.sizes_seen = (*self.sizes_seen, resident())
        return output


def measure_memory(rank: int, ranks: int, micro_batches: int) -> list[dict[str, Any]]:
    """For each rank and schedule, activations at their peak, in units of one micro-batch's."""
    rows, width = 256, 512
    found = []
    for name in ("gpipe", "1f1b"):
        schedule = build(name, ranks, 1, micro_batches)
        layers = [
            layer for _ in range(4) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
        worker = Watched({rank: nn.Sequential(*layers)}, ranks, lambda y, t: (y.sum(), len(t)))
        links = Links(schedule, dist.group.WORLD, torch.device("cpu"))
        batches = [MicroBatch(torch.randn(rows, width), torch.zeros(rows), rows) for _ in range(micro_batches)]
        peaks = []
        for _ in range(3):
            worker.begin(batches, schedule.actions[rank])
            worker.sizes_seen = (resident(),)
            execute(schedule.actions[rank], worker, links)
            first, second = worker.sizes_seen[:2]
            peaks.append((max(worker.sizes_seen) - first, second - first))
            gc.collect()
        # The first step also grew what stays, such as gradients.
        peak, _ = peaks[-1]
        # What autograd keeps of a block: the input of each linear layer and of each GELU.
        one = 4 * 4 * rows * (width + 4 * width + 4 * width)
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, peak / one)
        expected = [micro_batches if name == "gpipe" else min(ranks - r, micro_batches) for r in range(ranks)]
        found += [
            {"schedule": name, "rank": r, "theory": expected[r], "measured": round(told[r], 2)} for r in range(ranks)
        ]
        del worker, links
    return found


def prepare() -> None:
    """Settings of every rank's process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # The kernel may end a sleep 50 µs late to save wake-ups, which is no fault of a runtime.
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace, answers: Any) -> None:
    """One rank."""
    prepare()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    times = measure_times(rank, ranks, options)
    memory = [] if options.skip_memory or ranks != options.ranks[0] else measure_memory(rank, ranks, 2 * ranks)
    if rank == 0:
        answers.put((times, memory))
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All measurements with that many ranks."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(rank, ranks, folder, options, answers)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank failed with {process.exitcode}")
        result: tuple[list[dict[str, Any]], list[dict[str, Any]]] = answers.get()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipeline schedules against their theory.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="schedules")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--realtime", action="store_true", help="schedule the ranks before other programs")
    options = parser.parse_args()
    # Large blocks go back to the system when they are freed, so that the resident set tells what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    times, memory = [], []
    for ranks in options.ranks:
        one, other = run(ranks, options)
        times += one
        memory += other
    report(times, memory)


def report(times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> None:
    """Both tables for people, and all as JSON."""
    print("least times over theory; of ours also the median")
    names = (
        "theory ms",
        "ours ms",
        "  ours",
        "median",
        "  torch",
        "bare exchange",
        "with passes",
        "over 1f1b's theory",
    )
    print("schedule     ranks    m  " + "  ".join(names))
    for row in times:
        peer, passed = (
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("torch_over_theory", "bare_with_passes_over_theory")
        )
        good = row["over_1f1b_theory"] < 1 if row["schedule"].startswith("zb") else row["ours_over_theory"] <= TARGET
        print(
            f"{row['schedule']:<12} {row['ranks']:>5} {row['micro_batches']:>4} {row['theory_ms']:>10.1f} "
            f"{row['ours_ms']:>9.1f} {row['ours_over_theory']:>7.3f} {row['ours_median_over_theory']:>7.3f} {peer:>8} "
            f"{row['bare_over_theory']:>14.3f} {passed:>12} {row['over_1f1b_theory']:>19.3f}"
            f"  {'meets the target' if good else 'MISSES THE TARGET'}"
        )
    if memory:
        print("\nactivations at the peak, in micro-batches\nschedule  rank  theory  measured")
    for row in memory:
        print(f"{row['schedule']:<8} {row['rank']:>5} {row['theory']:>7} {row['measured']:>9.2f}")
    print(json.dumps({"times": times, "memory": memory}))


if __name__ == "__main__":
    main()
