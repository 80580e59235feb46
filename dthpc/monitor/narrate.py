"""Events as lines for people: what a follower prints above its bar, and the bar itself."""

from __future__ import annotations

from typing import Any

from dthpc.monitor.progress import Progress
from dthpc.monitor.units import UNKNOWN, count, decimal, duration, integer, milliseconds, number, size

BAR_CELLS = 24


def step_text(progress: Progress) -> str:
    """`120/200`, or `120` where the total is not known."""
    if progress.step is None:
        return UNKNOWN
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def bar_line(progress: Progress, now: float, width: int, unicode: bool = True) -> str:
    """One line of at most `width` characters: bar, step, loss, speed, step time and ETA.

    The least important parts are left out where the line is too short for all of them.
    """
    parts = [
        _bar(progress, unicode),
        f"step {step_text(progress)}",
        f"loss {decimal(progress.loss)}" if progress.loss is not None else "",
        _speed(progress) if progress.tokens_per_s is not None else "",
        f"{milliseconds(progress.step_time)}/step" if progress.step_time is not None else "",
        eta_text(progress, now),
        f"held-out {decimal(progress.eval_loss)}" if progress.eval_loss is not None else "",
        f"attempt {progress.attempt}" if progress.attempt else "",
    ]
    kept = [part for part in parts if part]
    for droppable in (parts[0], parts[6], parts[4], parts[7], parts[3]):
        if len("  ".join(kept)) <= width:
            break
        if droppable in kept:
            kept.remove(droppable)
    line = "  ".join(kept)
    if not unicode:
        line = line.replace(UNKNOWN, "?")
    return line[: max(0, width)]


def eta_text(progress: Progress, now: float) -> str:
    """`ETA 2m 03s`; or what is known instead of it."""
    stalled = progress.stalled_for(now)
    if stalled is not None and progress.attempt_end is None and progress.train_end is None:
        return f"no news for {duration(stalled)}"
    if progress.stop_signal is not None:
        return "saving"
    if progress.step is not None and progress.step == progress.total_steps:
        return "finishing"  # the last evaluation and checkpoint
    return f"ETA {duration(progress.eta(now))}"


def narrate(event: dict[str, Any], progress: Progress) -> str | None:
    """The line for an event, or `None` for one that only moves the bar.

    Args:
        event: the event.
        progress: the state after the event was applied.
    """
    teller = _TELLERS.get(str(event.get("kind")))
    return teller(event, progress) if teller is not None else None


def tell_step(progress: Progress, now: float) -> str:
    """A step record as a line of a log that nobody watches."""
    return (
        f"step {step_text(progress)}  loss {decimal(progress.loss, 4)}  {_speed(progress)}"
        f"  {milliseconds(progress.step_time)}/step  {eta_text(progress, now)}"
    )


def _speed(progress: Progress) -> str:
    unit = "tok" if progress.unit == "token" else f"{progress.unit}s"
    return f"{count(progress.tokens_per_s)} {unit}/s"


def _bar(progress: Progress, unicode: bool) -> str:
    if not progress.total_steps or progress.step is None:
        return ""
    share = min(1.0, max(0.0, progress.step / progress.total_steps))
    done = int(share * BAR_CELLS)
    full, empty = ("━", "─") if unicode else ("#", "-")
    return f"{int(share * 100):3d}% {full * done}{empty * (BAR_CELLS - done)}"


def _attempt_start(event: dict[str, Any], progress: Progress) -> str:
    nodes = event.get("nodes")
    names = [str(node) for node in nodes] if isinstance(nodes, list) else []
    where = ""
    if names:
        shown = ",".join(names[:4]) + (",…" if len(names) > 4 else "")
        where = f" on {len(names)} node{'s' if len(names) != 1 else ''} ({shown})"
    job = f", job {event['job_id']}" if event.get("job_id") else ""
    return f"attempt {event.get('attempt', 0)} starts{where}{job}"


def _ranks_ready(event: dict[str, Any], progress: Progress) -> str:
    world = integer(event.get("world_size"))
    return f"{world if world is not None else UNKNOWN} rank{'' if world == 1 else 's'} met"


def _train_start(event: dict[str, Any], progress: Progress) -> str:
    steps = step_text(progress).split("/")[-1]
    text = f"training {count(progress.parameters)} parameters, {steps} steps"
    if progress.unit == "token" and progress.tokens_per_step:
        text += f" of {count(progress.tokens_per_step)} tokens"
    elif progress.unit != "token" and progress.samples_per_step:
        # A sample may have several targets, which only the data know.
        text += f" of {count(progress.samples_per_step)} {'images' if progress.unit == 'image' else 'samples'}"
    layout = event.get("layout")
    if layout and layout != "dp=1":
        text += f", {layout}"
    if event.get("precision") not in (None, "fp32"):
        text += f", {event['precision']}"
    if progress.resumed_from:
        text += f", resumed from step {progress.resumed_from}"
    return text


def _changed(event: dict[str, Any], progress: Progress) -> str:
    changes = event.get("changes")
    told = ", ".join(map(str, changes)) if isinstance(changes, list) else UNKNOWN
    return f"{event.get('what', UNKNOWN)} changed since attempt {event.get('since', UNKNOWN)}: {told}"


def _memory(event: dict[str, Any], progress: Progress) -> str:
    named = (("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer state"))
    held = {label: number(event.get(name)) or 0.0 for name, label in named}
    formula = event.get("expected")
    values = [number(formula.get(name)) for name, _ in named] if isinstance(formula, dict) else [None]
    known = [value for value in values if value is not None]
    right = f" (by formula {size(sum(known))})" if len(known) == len(named) else ""
    shown = ", ".join(f"{label} {size(value)}" for label, value in held.items())
    return f"rank {event.get('rank', 0)} holds {size(sum(held.values()))}{right}: {shown}"


def _eval(event: dict[str, Any], progress: Progress) -> str:
    text = f"step {step_text_of(event)}  held-out loss {decimal(progress.eval_loss, 4)}"
    if progress.bits_per_byte is not None:
        text += f", {decimal(progress.bits_per_byte)} bits per byte"
        if progress.bigram_bits_per_byte is not None:
            text += f" (bigram model: {decimal(progress.bigram_bits_per_byte)})"
    return text


def _checkpoint_saved(event: dict[str, Any], progress: Progress) -> str:
    written = number(event.get("bytes"))
    volume = f", {size(written)}" if written is not None else ""
    took = number(event.get("seconds"))
    spent = f" in {duration(took)}" if took is not None else ""
    return f"step {step_text_of(event)}  checkpoint saved{spent}{volume}"


def _checkpoint_rejected(event: dict[str, Any], progress: Progress) -> str:
    return f"checkpoint {event.get('path', UNKNOWN)} is not used: {event.get('why', 'it does not verify')}"


def _checkpoint_restored(event: dict[str, Any], progress: Progress) -> str:
    return f"restored step {step_text_of(event)} from {event.get('path', UNKNOWN)}"


def _stop_requested(event: dict[str, Any], progress: Progress) -> str:
    at = f" at step {event['step']}" if event.get("step") is not None else ""
    what = "saving…" if progress.trains else "nothing to save yet"
    return f"asked to stop by {progress.stop_signal}{at}: {what}"


def _attempt_end(event: dict[str, Any], progress: Progress) -> str | None:
    decision = str(event.get("decision") or "")
    if decision in ("finish", "stop"):
        return None  # the end of the run, which whoever shows this event tells at greater length
    reason = str(event.get("reason") or event.get("cause") or "no reason given")
    saved = f", checkpoint of step {progress.checkpoint_step} saved" if progress.checkpoint_step is not None else ""
    at = f" at step {progress.step}" if progress.step is not None else ""
    return f"{event.get('cause', 'stopped')}{at}{saved}; waiting for the restart ({reason})"


def _preflight(event: dict[str, Any], progress: Progress) -> str:
    return str(event.get("text", ""))


def _measured(event: dict[str, Any], progress: Progress) -> str:
    return str(event.get("text", ""))


def _incident(event: dict[str, Any], progress: Progress) -> str:
    known = {"time", "kind", "attempt", "what"}
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in known)
    return f"incident: {event.get('what', UNKNOWN)}" + (f" ({rest})" if rest else "")


def step_text_of(event: dict[str, Any]) -> str:
    """The step that an event speaks of."""
    step = event.get("step")
    return UNKNOWN if step is None else str(step)


_TELLERS = {
    "attempt_start": _attempt_start,
    "ranks_ready": _ranks_ready,
    "train_start": _train_start,
    "changed": _changed,
    "memory": _memory,
    "eval": _eval,
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_rejected": _checkpoint_rejected,
    "checkpoint_restored": _checkpoint_restored,
    "stop_requested": _stop_requested,
    "attempt_end": _attempt_end,
    "incident": _incident,
    "measured": _measured,
    "preflight": _preflight,
}
