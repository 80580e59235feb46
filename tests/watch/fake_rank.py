"""A rank without torch, for tests of what surrounds ranks: it trains as its run's `story.json` says.

`{"steps": 30, "pause": 0.01, "fail_at": 12, "hang_at": 5}`: steps with a pause each; after `fail_at` steps rank 1 ends
with an error (`"kill"`: by SIGKILL instead); after `hang_at` steps of the first attempt all wait until they are asked
to stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from dthpc.monitor.events import EventLog
from dthpc.placement.identity import from_environment
from dthpc.resilience.outcome import RankRecord
from dthpc.resilience.stop import StopFlag
from dthpc.rundir import RunDir


def main() -> int:
    stop = StopFlag().install()
    run = RunDir(Path(sys.argv[1]))
    story = json.loads((run.path / "story.json").read_text())
    identity = from_environment(os.environ)
    rank, number = identity.rank, identity.attempt
    events = EventLog(run.events, attempt=number) if rank == 0 else None
    steps = story["steps"]
    if events:
        events.write("ranks_ready", world_size=2)
        events.write("train_start", step=0, total_steps=steps, tokens_per_step=1024, params=1000, resumed_from=None)
    step = 0
    while step < steps and stop.requested is None:
        time.sleep(story.get("pause", 0.001))
        step += 1
        if events:
            events.write("step", step=step, loss=3.0 / step, step_time=0.01, tokens_per_s=1e5, samples=step)
        if step == story.get("fail_at") and rank == 1:
            return fail(run, number, step, story.get("kill", False))
        if step == story.get("fail_at") or (step == story.get("hang_at") and number == 0):
            while stop.requested is None:
                time.sleep(0.01)
    return end(run, number, rank, step, steps, stop, events)


def fail(run: RunDir, number: int, step: int, kill: bool) -> int:
    """End as rank 1, once rank 0 has come as far."""
    while f'"step":{step},' not in run.events.read_text():
        time.sleep(0.01)
    print(f"rank 1 is about to fail at step {step}", flush=True)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    RankRecord(1, "crash", error="ValueError: the data has a hole", step=step).write(run.attempt(number))
    return 1


def end(run: RunDir, number: int, rank: int, step: int, steps: int, stop: StopFlag, events: EventLog | None) -> int:
    cause = "finished" if step == steps else "preempted"
    if events:
        if cause == "finished":
            events.write("eval", step=step, loss=2.0, bits_per_byte=3.1, bigram_bits_per_byte=3.4)
            events.write("train_end", step=step, seconds=1.0, tokens_per_s=1e5, step_time=0.01)
        else:
            events.write("stop_requested", signal=stop.requested, step=step)
            events.write("checkpoint_saved", step=step, path="none", seconds=0.1, bytes=1000)
    record = RankRecord(rank, cause, signal=stop.requested, step=step)
    record.write(run.attempt(number))
    return record.code


if __name__ == "__main__":
    sys.exit(main())
