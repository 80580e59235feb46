"""Where the time of a pipeline step goes beyond theory: its critical path, taken apart.

    python benchmarks/pipeline_trace.py [--schedule 1f1b] [--ranks 4] [--micro-batches 16] [--repeats 8]

Runs the steps of `benchmarks/pipeline.py` with the clock read around every part of every pass, takes the fastest step,
and walks back from its last pass: each pass began when the one before it on its rank ended, or when its message came,
whichever was later. What is not the stages' own time is reported in these parts:

    oversleep   a stage's sleep ended late
    before      between a pass's beginning and its sleep: the worker, the module, autograd
    after       between its sleep and its end; of passes for weight gradients the oversleep too
    sending     giving its result away
    taking      taking a message that was there before it was wanted
    message     from the end of a pass to the beginning of one on another rank that waited for its result
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import pipeline
from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule, build
from dthpc.parallel.pipeline.verify import needs

SECONDS = {
    Kind.F: pipeline.FORWARD,
    Kind.B: pipeline.INPUT + pipeline.WEIGHT,
    Kind.I: pipeline.INPUT,
    Kind.W: pipeline.WEIGHT,
}


class Pass(NamedTuple):
    """When one pass came to what, in seconds of the host's clock."""

    action: Action
    began: float
    received: float
    due: float
    """When its sleep should have ended."""
    woke: float
    computed: float
    sent: float


class Clock:
    """Writes down the passes of one rank."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.due = self.woke = 0.0

    def sleep_until(self, moment: float) -> None:
        """In place of the stages' sleep."""
        time.sleep(max(0.0, moment - time.perf_counter()))
        self.due, self.woke = moment, time.perf_counter()

    def execute(self, actions: tuple[Action, ...], worker: Any, links: Links) -> None:
        """In place of `dthpc.parallel.pipeline.runtime.execute`: the same walk."""
        now = time.perf_counter
        compute = {Kind.F: worker.forward, Kind.B: worker.backward, Kind.I: worker.input_backward}
        for action, need, give in links.begin(actions, worker.sizes):
            kind, stage, micro_batch = action
            began = received = now()
            if kind is Kind.W:
                self.due = self.woke = began + SECONDS[kind] * worker._chunks[stage].share
                worker.weight_backward(stage, micro_batch)
                computed = sent = now()
            else:
                taken = links.receive(need)
                received = now()
                made = compute[kind](stage, micro_batch, taken)
                computed = now()
                links.send(give, made)
                sent = now()
            self.passes.append(Pass(action, began, received, self.due, self.woke, computed, sent))
        links.finish()


def fastest(rank: int, ranks: int, folder: str, options: argparse.Namespace, answers: Any) -> None:
    """One rank: its passes in the step that took least time."""
    pipeline.prepare()
    clock = Clock()
    pipeline.sleep_until, pipeline.execute = clock.sleep_until, clock.execute
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    step = pipeline.ours(rank, options.schedule, ranks, options.chunks, options.micro_batches)
    best, passes = float("inf"), clock.passes
    for repeat in range(options.repeats + 1):
        clock.passes = []
        took = pipeline.timed(step)
        if repeat and took < best:
            best, passes = took, clock.passes
    answers.put((rank, best, passes))
    dist.barrier()
    dist.destroy_process_group()


def critical_path(schedule: Schedule, passes: dict[int, list[Pass]], chunks: int) -> tuple[Counter[str], int, int]:
    """Seconds of each part, and how many passes and messages are on the path."""
    places = {one.action: (rank, number) for rank, mine in passes.items() for number, one in enumerate(mine)}
    rank = max(passes, key=lambda each: passes[each][-1].sent)
    number, spent, count, messages = len(passes[rank]) - 1, Counter[str](), 0, 0
    while True:
        one = passes[rank][number]
        seconds = SECONDS[one.action.kind] / chunks
        spent["stages"] += seconds
        spent["oversleep"] += one.woke - one.due
        spent["before"] += one.due - seconds - one.received
        spent["after"] += one.computed - one.woke
        count += 1
        need = needs(schedule, one.action)
        if need is not None and need not in places:
            need = need._replace(kind=Kind.I)
        source, place = places[need] if need is not None else (rank, 0)
        before = passes[rank][number - 1] if number else None
        if source != rank and (before is None or passes[source][place].computed > before.sent):
            spent["message"] += one.received - passes[source][place].computed
            rank, number, messages = source, place, messages + 1
        elif before is not None:
            spent["taking"] += one.received - before.sent
            spent["sending"] += before.sent - before.computed
            number -= 1
        else:
            return spent, count, messages


def main() -> None:
    parser = argparse.ArgumentParser(description="The critical path of a pipeline step.")
    parser.add_argument("--schedule", choices=[name for name, _ in pipeline.SCHEDULES], default="1f1b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    options.chunks = dict(pipeline.SCHEDULES)[options.schedule]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, options.ranks, folder, options, answers) for rank in range(options.ranks)]
        processes = [context.Process(target=fastest, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = [answers.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    schedule = build(options.schedule, options.ranks, options.chunks, options.micro_batches)
    theory = pipeline.theory(options.schedule, options.ranks, options.chunks, options.micro_batches)
    spent, count, messages = critical_path(schedule, {rank: mine for rank, _, mine in found}, options.chunks)
    took = found[0][1]
    print(f"{took * 1e3:.1f} ms, {took / theory:.4f} of theory; {count} passes and {messages} messages decide")
    for part in ("oversleep", "before", "after", "sending", "taking", "message"):
        share, each = spent[part] / theory, spent[part] / count
        print(f"{part:<10} {spent[part] * 1e3:7.2f} ms {share:7.2%} {each * 1e6:7.0f} µs a pass")


if __name__ == "__main__":
    main()
