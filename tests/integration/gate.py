"""What the tests of interruptions plug into a training run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dthpc.train.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from dthpc.train.loop import Training


class Gate(Callback):
    """Holds the run once at each of some steps, until the test opens the gate or the rank is asked to stop.

    So the test knows where the run is when it strikes, and needs no clock.
    """

    def __init__(self, at: list[int]) -> None:
        self.at = at

    def on_step(self, training: Training, record: StepRecord) -> None:
        if record.step not in self.at:
            return
        folder, rank = training.context.run.path, training.context.identity.rank
        (folder / f"held-{record.step}-{rank}").touch()
        opened = folder / f"open-{record.step}"
        while not opened.exists() and training.context.stop.requested is None:
            time.sleep(0.02)


def broken(config: Any, context: Any) -> None:
    """A job that fails at once, at every start."""
    raise ValueError("this job is broken")
