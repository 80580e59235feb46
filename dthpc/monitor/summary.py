"""The last screen of a run: what it reached and where everything lies."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from dthpc.monitor.narrate import step_text
from dthpc.monitor.progress import Progress
from dthpc.monitor.table import Column
from dthpc.monitor.units import count, decimal, duration, integer, milliseconds, number, size
from dthpc.rundir import RunDir


def summary_lines(run: RunDir, progress: Progress, checkpoint: Path | None, attempts: int) -> list[str]:
    """The summary of a finished training.

    Args:
        run: the run.
        progress: what its events add up to.
        checkpoint: the newest verified checkpoint, if there is one.
        attempts: how many attempts it took.

    Returns:
        Aligned lines; a line about something that the run did not record is left out.
    """
    if progress.report is not None and progress.train_end is None:
        return report_lines(run, progress.report, attempts)
    end = progress.train_end or {}
    took = number(end.get("seconds"))
    spent = f" in {duration(took)}" if took is not None else ""
    tries = f", {attempts} attempts" if attempts > 1 else ""
    rows = [
        ("finished", f"{run.name}: step {step_text(progress)}{spent}{tries}"),
        ("loss", _losses(progress)),
        ("bits per byte", _bits(progress)),
        ("throughput", _throughput(progress)),
        ("time", _times(end)),
        ("memory", _memory(end)),
        ("loss scale", _scaling(end)),
        *place_rows(run, checkpoint),
        ("details", f"python -m dthpc.status {run_word(run)}"),
        ("go on", f"the same command with run.name={run.name} run.on_change=accept and more train.steps"),
    ]
    return aligned([(label, text) for label, text in rows if text])


def report_tables(report: dict[str, Any]) -> list[tuple[str, list[Column], list[list[str]]]]:
    """Title, columns and rows of each table that a job left for the last screen."""
    found = []
    for table in report.get("tables") or []:
        columns = [Column(str(title), right=bool(right)) for title, right in table["columns"]]
        found.append((str(table.get("title") or ""), columns, [[str(cell) for cell in row] for row in table["rows"]]))
    return found


def report_lines(run: RunDir, report: dict[str, Any], attempts: int) -> list[str]:
    """The summary of a job that does not train, below its tables."""
    tries = f", {attempts} attempts" if attempts > 1 else ""
    rows = [("finished", f"{run.name}{tries}")]
    rows += [(str(label), str(text)) for label, text in report.get("rows") or []]
    return aligned([*rows, *place_rows(run, None)])


def place_rows(run: RunDir, checkpoint: Path | None) -> list[tuple[str, str]]:
    """Where everything of a run lies, as labels and texts."""
    rows = [("folder", short_path(run.path))]
    if checkpoint is not None:
        rows.append(("checkpoint", short_path(checkpoint)))
    if run.tensorboard.is_dir():
        rows.append(("curves", f"tensorboard --logdir {shlex.quote(short_path(run.tensorboard))}"))
    return rows


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    """Labels and texts as lines with the texts in one column."""
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{label:<{width}}  {text}".rstrip() for label, text in rows]


def run_word(run: RunDir) -> str:
    """What to type for a run: its name where it lies under `runs/` of this folder, else its path."""
    if run.path.parent == Path(os.path.abspath("runs")):
        return shlex.quote(run.name)
    return shlex.quote(short_path(run.path))


def short_path(path: Path) -> str:
    """A path relative to this folder where it lies inside of it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return str(path)


def _losses(progress: Progress) -> str:
    parts = []
    if progress.loss is not None:
        parts.append(f"{decimal(progress.loss, 4)} training")
    if progress.eval_loss is not None:
        parts.append(f"{decimal(progress.eval_loss, 4)} held-out")
    article = "an" if progress.unit[0] in "aeiou" else "a"
    return ", ".join(parts) + f" (nats {article} {progress.unit})" if parts else ""


def _bits(progress: Progress) -> str:
    if progress.bits_per_byte is None:
        return ""
    text = f"{decimal(progress.bits_per_byte)} held-out"
    baseline = progress.bigram_bits_per_byte
    if baseline is None:
        return text
    gain = baseline - progress.bits_per_byte
    verdict = f"{decimal(abs(gain))} {'better' if gain >= 0 else 'worse'}"
    return f"{text}; a bigram model: {decimal(baseline)} ({verdict})"


def _times(end: dict[str, Any]) -> str:
    """Where the time of the last attempt went, and what interruptions cost over all of them."""
    shown = (
        ("step_seconds", "steps"),
        ("eval_seconds", "evaluation"),
        ("checkpoint_seconds", "checkpoints"),
        ("lost_seconds", "lost by interruptions"),
    )
    values = [(number(end.get(field)), label) for field, label in shown]
    return ", ".join(f"{duration(value)} {label}" for value, label in values if value)


def _memory(end: dict[str, Any]) -> str:
    held = number(end.get("state_bytes"))
    return f"{size(held)} of parameters, gradients and optimizer state on rank 0" if held else ""


def _scaling(end: dict[str, Any]) -> str:
    scale, skipped = number(end.get("loss_scale")), integer(end.get("skipped_steps"))
    if scale is None:
        return ""
    left_out = f", {skipped} update{'' if skipped == 1 else 's'} left out" if skipped is not None else ""
    return f"{scale:g}{left_out}"


def _throughput(progress: Progress) -> str:
    end = progress.train_end or {}
    rate = number(end.get("tokens_per_s"))
    rate = progress.tokens_per_s if rate is None else rate
    if rate is None:
        return ""
    ranks = f" over {progress.world_size} ranks" if progress.world_size and progress.world_size > 1 else ""
    step_time = number(end.get("step_time"))
    step_time = progress.step_time if step_time is None else step_time
    pace = f", {milliseconds(step_time)} a step" if step_time is not None else ""
    return f"{count(rate)} {progress.unit}s/s{ranks}{pace}"
