"""What the training loop adds to the step time of a loop that one writes by hand around the same model.

    python benchmarks/train_overhead.py [--ranks 2] [--repeats 12] [--steps 10] [overrides of the configuration]

Both loops train the default model on the same text, in the same processes, in turns of a few steps (A B A B …), so that
whatever else the machine does hits both alike. The loop by hand is torch's DistributedDataParallel with gradients as
views of its buckets, a DataLoader, clipping, fused AdamW, a cosine schedule, and nothing else. The other one is
`dthpc.jobs.train` with all records on: events, TensorBoard, agreement on stops, checks for numbers that are not finite.

Prints the median over the repeats of the ratio of both times, for wall-clock time and for CPU time of rank 0, which
other programs on the machine disturb less; the target is a ratio of at most 1.02.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dthpc.config.compose import read_command_line
from dthpc.context import RankContext
from dthpc.jobs.build import build_model
from dthpc.jobs.train import run
from dthpc.monitor.events import EventLog
from dthpc.parallel.materialize import fill
from dthpc.parallel.parts import whole_parts
from dthpc.placement.identity import RankIdentity
from dthpc.rundir import RunDir
from dthpc.train.callbacks import Callback, StepRecord
from dthpc.train.loop import Training

WARM_UP = 5


class Turns(Callback):
    """After every few steps of the loop under test, makes as many of the loop by hand, and times both."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ours: list[tuple[float, float]] = []
        self.by_hand: list[tuple[float, float]] = []

    def on_train_start(self, training: Training) -> None:
        self.hand = HandWritten(training.config, training.data, training.context.identity)
        self.hand.run(WARM_UP)
        training.context.turns = self  # type: ignore[attr-defined]

    def on_step(self, training: Training, record: StepRecord) -> None:
        done = record.step - WARM_UP
        if done < 0 or done % self.steps:
            return
        if done:
            self.ours.append(self._since())
        self._start()
        self.hand.run(self.steps)
        self.by_hand.append(self._since())
        self._start()

    def _start(self) -> None:
        dist.barrier()
        self._began = time.perf_counter(), time.process_time()

    def _since(self) -> tuple[float, float]:
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


class HandWritten:
    """The loop that one writes by hand."""

    def __init__(self, config: Any, data: Any, identity: RankIdentity) -> None:
        self.config = config
        model = build_model(config, data)
        fill([model], whole_parts([model]), config.run.seed, torch.device("cpu"))
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
        sampler: Any = DistributedSampler(data.train, identity.world_size, identity.rank)
        share = config.train.global_batch // identity.world_size
        self.batches = iter(DataLoader(data.train, batch_size=share, sampler=sampler, drop_last=True))
        self.step = 0

    def run(self, steps: int) -> None:
        config = self.config
        for _ in range(steps):
            inputs, targets = next(self.batches)
            logits = self.model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.train.grad_clip)
            rate = config.optim.lr * 0.5 * (1 + math.cos(math.pi * self.step / 10_000))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.step += 1


def work(rank: int, size: int, folder: str, overrides: list[str], steps: int, answers: Any) -> None:
    """One rank of both loops."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    config = compose(overrides)
    config.callbacks = {"turns": {"_target_": f"{__name__}.Turns", "steps": steps}}
    run_dir = RunDir(Path(folder) / "run")
    identity = RankIdentity(rank, size, rank, size, 0, 1, "here", 0)
    events = EventLog(run_dir.events) if rank == 0 else None
    context = RankContext(identity, run_dir, torch.device("cpu"), "gloo", events=events)
    run(config, context)
    if rank == 0:
        turns = context.turns  # type: ignore[attr-defined]
        answers.put((turns.ours, turns.by_hand))
    dist.destroy_process_group()


def compose(overrides: list[str]) -> Any:
    """The default configuration with a user's overrides."""
    from omegaconf import OmegaConf

    ((config, _),), _ = read_command_line(overrides, "train_overhead")
    OmegaConf.set_struct(config, False)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of the training loop over one written by hand.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="steps of each turn")
    options, overrides = parser.parse_known_args()
    total = WARM_UP + options.repeats * options.steps + 1
    fixed = [f"train.steps={total}", "train.eval_every=-1", "checkpoint.every=0", "monitor.log_every=10"]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, [*fixed, *overrides], options.steps, answers)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        ours, by_hand = answers.get()
        for process in processes:
            process.join()
    report(ours, by_hand, options.steps)


def report(ours: list[tuple[float, float]], by_hand: list[tuple[float, float]], steps: int) -> None:
    """Print both times and the ratio, for people and as JSON."""
    result = {}
    for number, clock in enumerate(("wall", "cpu")):
        pairs = [(a[number] / steps, b[number] / steps) for a, b in zip(ours, by_hand, strict=False)]
        ratios = [a / b for a, b in pairs]
        mine, hand = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
        result[clock] = {
            "loop_ms": round(mine, 2),
            "by_hand_ms": round(hand, 2),
            "ratio": round(statistics.median(ratios), 4),
            "best_ratio": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 4),
        }
        print(f"{clock:>4}: loop {mine:.2f} ms, by hand {hand:.2f} ms a step, ratio {result[clock]['ratio']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
