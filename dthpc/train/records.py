"""The records of a training, written by rank 0: events, curves and the closing summary."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dthpc.monitor.events import EventLog
from dthpc.monitor.tensorboard import ScalarWriter
from dthpc.train.callbacks import Callback, CheckpointRecord, EvalRecord, MemoryRecord, StepRecord
from dthpc.train.summary import Totals, summarize

if TYPE_CHECKING:
    from dthpc.train.loop import Training


class EventRecorder(Callback):
    """Writes `events.jsonl`: a metric record every `every` steps, and everything that happens between them."""

    def __init__(self, events: EventLog, every: int, bigram_bits_per_byte: float | None) -> None:
        """Take the log, the steps between records, and the baseline to tell with each evaluation."""
        self._events = events
        self._every = every
        self._bigram = bigram_bits_per_byte
        self._window = Totals()
        self._whole = Totals()
        self._state_bytes: int | None = None

    def on_train_start(self, training: Training) -> None:
        """Tell how much work there is."""
        train, unit = training.config.train, unit_of(training.data)
        self._events.write(
            "train_start",
            step=training.state.step,
            total_steps=train.steps,
            unit=unit,
            samples_per_step=train.global_batch,
            tokens_per_step=train.global_batch * train.seq_len if unit == "token" else None,
            params=training.model.elements,
            resumed_from=training.resumed_from,
            layout=training.model.layout.describe(),
            precision=training.model.precision.compute,
            stored=str(training.model.precision.storage).removeprefix("torch."),
        )

    def on_memory(self, training: Training, record: MemoryRecord) -> None:
        """Tell what parameters, gradients and optimizer state take on this rank, measured and by formula."""
        measured, expected = asdict(record.measured), asdict(record.expected)
        self._state_bytes = int(record.measured.total)
        self._events.write("memory", step=record.step, rank=training.model.mesh.rank, **measured, expected=expected)

    def on_step(self, training: Training, record: StepRecord) -> None:
        """Add the step to the totals; the first step, every `every` steps and the last one are written."""
        self._window.add(record)
        self._whole.add(record)
        first = self._whole.steps == 1
        if first or record.step % self._every == 0 or record.step == training.config.train.steps:
            self._write_step(record)

    def _write_step(self, record: StepRecord) -> None:
        window, self._window = self._window, Totals()
        self._events.write(
            "step",
            step=record.step,
            loss=window.loss,
            lr=record.lr,
            grad_norm=record.grad_norm,
            tokens=window.targets,
            step_time=window.seconds / window.steps,
            tokens_per_s=window.targets / max(window.seconds, 1e-9),
            data_wait=window.data_wait / window.steps,
            samples=record.samples,
            **scaling(record),
        )

    def on_eval(self, training: Training, record: EvalRecord) -> None:
        """Tell the held-out loss and its baseline."""
        self._whole.eval_seconds += record.seconds
        self._events.write(
            "eval",
            step=record.step,
            loss=record.loss,
            bits_per_byte=record.bits_per_byte,
            bigram_bits_per_byte=self._bigram,
            tokens=record.targets,
            whole=record.whole,
            seconds=record.seconds,
        )

    def on_checkpoint(self, training: Training, record: CheckpointRecord) -> None:
        """Tell where a checkpoint lies."""
        self._whole.checkpoint_seconds += record.seconds
        self._events.write(
            "checkpoint_saved", step=record.step, path=record.path, seconds=record.seconds, bytes=record.size
        )

    def on_stop(self, training: Training, signal: str) -> None:
        """Tell that the run stops before its end."""
        self._events.write("stop_requested", signal=signal, step=training.state.step)

    def on_incident(self, training: Training, what: str, why: str) -> None:
        """Tell what went wrong."""
        self._events.write("incident", what=what, why=why, step=training.state.step)

    def on_train_end(self, training: Training) -> None:
        """Tell what came of it all."""
        self._events.write("train_end", **summarize(training, self._whole, self._bigram), state_bytes=self._state_bytes)


def unit_of(data: Any) -> str:
    """What one target is: as the data say by their `unit`, else a token where they have a vocabulary, else a target."""
    return str(getattr(data, "unit", None) or ("token" if getattr(data, "vocab_size", None) else "target"))


def scaling(record: StepRecord) -> dict[str, Any]:
    """Loss scale and what it cost so far; nothing for formats that need none."""
    if record.loss_scale is None:
        return {}
    return {
        "loss_scale": record.loss_scale,
        "skipped_steps": record.skipped_steps,
        "overflows": record.overflows,
    }


class TensorBoard(Callback):
    """Draws curves of the same numbers."""

    def __init__(self, writer: ScalarWriter, every: int) -> None:
        """Take the writer, and the steps between points."""
        self._writer = writer
        self._every = every

    def on_step(self, training: Training, record: StepRecord) -> None:
        """Draw loss, rate, gradient norm and speed."""
        if record.step % self._every:
            return
        values = {
            "train/loss": record.loss,
            "train/learning_rate": record.lr,
            "train/gradient_norm": record.grad_norm,
            "speed/step_seconds": record.seconds,
            f"speed/{unit_of(training.data)}s_per_second": record.targets / max(record.seconds, 1e-9),
            "speed/data_wait_seconds": record.data_wait,
        }
        if not math.isfinite(record.grad_norm):
            del values["train/gradient_norm"]  # one infinite point would hide the curve
        self._writer.write(record.step, values | {f"scaling/{name}": value for name, value in scaling(record).items()})

    def on_eval(self, training: Training, record: EvalRecord) -> None:
        """Draw the held-out loss."""
        values = {"valid/loss": record.loss}
        if record.bits_per_byte is not None:
            values["valid/bits_per_byte"] = record.bits_per_byte
        self._writer.write(record.step, values)

    def on_stop(self, training: Training, signal: str) -> None:
        """Leave whole files."""
        self._writer.close()

    def on_train_end(self, training: Training) -> None:
        """Leave whole files."""
        self._writer.close()
