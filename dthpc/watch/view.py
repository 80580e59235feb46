"""Reports as text: one row of the table of all runs, or the screen of one run."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TextIO

from dthpc.monitor.summary import aligned, place_rows, run_word, short_path
from dthpc.monitor.table import Column, is_terminal, print_lines, print_table, terminal_width
from dthpc.monitor.units import UNKNOWN, clock, count, decimal, duration, milliseconds, text
from dthpc.rundir import RunDir
from dthpc.watch.report import AttemptReport, RunReport

STYLES = {
    "running": "green",
    "saving": "yellow",
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "pending": "cyan",
    "requeued": "cyan",
    "held": "yellow",
}

_COLUMNS = (
    Column("RUN"),
    Column("STATE"),
    Column("STEP", right=True),
    Column("LOSS", right=True),
    Column("BITS/BYTE", right=True),
    Column("TOK/S", right=True),
    Column("ETA", right=True),
    Column("ATTEMPTS", right=True),
    Column("JOB"),
    Column("CHECKPOINT", right=True),
    Column("WHY", fold=True),
)


_WHY = 100
"""Characters of a reason that the table shows; the screen of the run has all of it."""

_WIDE = 120
"""Columns of a terminal from which on the table has room for the reasons."""


def print_overview(out: TextIO, reports: list[RunReport]) -> None:
    """Print the table of runs."""
    rows = [_row(report) for report in reports]
    styles = [STYLES.get(report.state, "") for report in reports]
    if not is_terminal(out) or terminal_width(out) >= _WIDE:
        print_table(out, _COLUMNS, rows, styles)
        return
    # Beside the numbers, the reasons would have a few letters a line: they go below.
    print_table(out, _COLUMNS[:-1], [row[:-1] for row in rows], styles)
    for row in rows:
        if row[-1]:
            print_lines(out, f"{row[0]}: {row[-1]}")


def print_detail(out: TextIO, report: RunReport, now: float | None = None) -> None:
    """Print all that is known of one run."""
    now = time.time() if now is None else now
    print_lines(out, "\n".join(aligned(_facts(report, now))))
    if report.attempts:
        print_lines(out, "")
        print_table(out, _ATTEMPT_COLUMNS, [_attempt_row(attempt, report, now) for attempt in report.attempts])
    for line in failure_lines(report):
        print_lines(out, line)


def failure_lines(report: RunReport) -> list[str]:
    """What the first failing rank left, with the last lines of its log; nothing where the reason says it all."""
    failure = report.failure
    if failure is None:
        return []
    if failure.cause == "user_error" and failure.error and failure.error in (report.why or ""):
        return []
    host = f" on {failure.host}" if failure.host else ""
    step = f" after step {failure.step}" if failure.step is not None else ""
    rank = f", rank {failure.rank}" if failure.rank is not None else ""
    what = failure.error or failure.cause
    lines = ["", f"first failure: attempt {failure.attempt}{rank}{host}{step}: {what}"]
    if failure.log_tail and failure.log is not None:
        lines += [f"last lines of {short_path(Path(failure.log))}:", *(f"  | {line}" for line in failure.log_tail)]
    return lines


def hint(report: RunReport) -> str | None:
    """What to type next for a run in this state."""
    word = run_word(RunDir(Path(report.path)))
    same = f"the same command with run.name={shlex.quote(report.name)}"
    if report.state in ("running", "saving", "pending", "requeued"):
        return f"follow it: python -m dthpc.status {word} --watch"
    if report.state in ("stopped", "cancelled"):
        return f"{same} goes on" + (f" from step {report.checkpoint.step}" if report.checkpoint else " from the start")
    if report.state in ("failed", "lost"):
        return f"mend the cause, then {same} goes on" + (
            f" from step {report.checkpoint.step}" if report.checkpoint else ""
        )
    return None


def _row(report: RunReport) -> list[str]:
    return [
        report.name,
        report.state,
        _step(report),
        _known(report.loss, decimal(report.loss)),
        _known(report.bits_per_byte, decimal(report.bits_per_byte)),
        _speed(report) if report.tokens_per_s is not None and not report.ended else "",
        _known(report.eta_s, duration(report.eta_s)),
        str(len(report.attempts)),
        report.job_id or "",
        str(report.checkpoint.step) if report.checkpoint is not None else "",
        _why(report),
    ]


def _speed(report: RunReport) -> str:
    """The number alone for tokens, of which the column's title speaks."""
    return count(report.tokens_per_s) + ("" if report.unit == "token" else f" {report.unit}s")


def _why(report: RunReport) -> str:
    parts = [report.why if report.state != "finished" else None, report.conflict, *report.unreadable[:1]]
    if report.pending is not None and report.pending.start is not None:
        parts.append(f"expected to start {clock(report.pending.start)}")
    why = " ".join("; ".join(part for part in parts if part).split())
    return why if len(why) <= _WHY else why[: _WHY - 1].rstrip() + "…"


def _facts(report: RunReport, now: float) -> list[tuple[str, str]]:
    rows = [("run", report.name), ("state", report.state + (f": {text(report.why)}" if report.why else ""))]
    rows += [("disagreement", report.conflict or ""), ("job", _job(report))]
    if report.pending is not None and report.pending.start is not None:
        rows.append(("start", f"expected {clock(report.pending.start)}"))
    rows.append(("step", _step(report)))
    if report.state == "running":
        rows.append(("ETA", duration(report.eta_s) if report.eta_s is not None else "not known"))
    rows.append(("loss", f"{decimal(report.loss, 4)} training" if report.loss is not None else ""))
    rows.append(("held-out", _held_out(report)))
    if report.tokens_per_s is not None:
        rows.append(
            ("throughput", f"{count(report.tokens_per_s)} {report.unit}s/s, {milliseconds(report.step_time)} a step")
        )
    if report.updated is not None:
        rows.append(("last news", f"{duration(now - report.updated)} ago ({clock(report.updated)})"))
    checkpoint = report.checkpoint
    rows += place_rows(RunDir(Path(report.path)), Path(checkpoint.path) if checkpoint else None)
    if checkpoint is None:
        rows.append(("checkpoint", "none that verifies"))
    else:
        rows.append(("verified", f"step {checkpoint.step}, {_VERIFIED[checkpoint.verified]}"))
    rows += [("rejected", why) for why in report.rejected]
    rows += [("unreadable", why) for why in report.unreadable]
    rows.append(("next", hint(report) or ""))
    return [(label, fact) for label, fact in rows if fact]


_VERIFIED = {"quick": "by names and sizes (--verify reads every byte)", "full": "every checksum"}


def _held_out(report: RunReport) -> str:
    if report.eval_loss is None:
        return ""
    told = f"{decimal(report.eval_loss, 4)} at step {report.eval_step}"
    if report.bits_per_byte is not None:
        told += f", {decimal(report.bits_per_byte)} bits per byte"
    if report.bigram_bits_per_byte is not None:
        told += f" (bigram model: {decimal(report.bigram_bits_per_byte)})"
    return told


def _job(report: RunReport) -> str:
    if report.kind == "local":
        return "local processes"
    if report.job_id is None:
        return report.kind or ""
    return f"{report.job_id} ({report.job_state})" if report.job_state else report.job_id


_ATTEMPT_COLUMNS = (
    Column("ATTEMPT", right=True),
    Column("STARTED"),
    Column("TOOK", right=True),
    Column("NODES", fold=True),
    Column("JOB"),
    Column("CAUSE OF END"),
    Column("DECISION"),
    Column("REASON", fold=True),
)


def _attempt_row(attempt: AttemptReport, report: RunReport, now: float) -> list[str]:
    newest = attempt is report.attempts[-1]
    open_end = attempt.ended is None and not (newest and not report.ended)
    nodes = ",".join(attempt.nodes[:4]) + (f",… ({len(attempt.nodes)})" if len(attempt.nodes) > 4 else "")
    return [
        str(attempt.number),
        clock(attempt.started),
        UNKNOWN if open_end else duration(attempt.duration(now)),
        nodes,
        attempt.job_id or "",
        attempt.cause or ("not recorded" if open_end else ""),
        attempt.decision or "",
        text(attempt.reason) or "",
    ]


def _step(report: RunReport) -> str:
    if report.step is None:
        return ""
    return str(report.step) if report.total_steps is None else f"{report.step}/{report.total_steps}"


def _known(value: float | None, text: str) -> str:
    return "" if value is None else text
