"""Pictures of a schedule in time: text for a terminal, SVG for a document; free of torch."""

from __future__ import annotations

from html import escape

from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule
from dthpc.parallel.pipeline.theory import Span, Timeline, simulate

COLOURS = {Kind.F: "#7aa6da", Kind.B: "#8fbf7f", Kind.I: "#63b3a4", Kind.W: "#d9c06c"}
WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}

_CELL, _ROW, _LEFT, _TOP = 26, 24, 64, 40


def in_time(schedule: Schedule) -> Timeline:
    """The schedule where a forward pass, an input gradient and a weight gradient of a stage take 1 each."""
    return simulate(schedule, 1, 1, 1)


def text(schedule: Schedule, timeline: Timeline) -> str:
    """A line for each rank, of cells as wide as the time they take; dots are idle time.

    Args:
        schedule: what is drawn.
        timeline: its times, which are whole numbers, as `in_time` makes them.
    """
    cell = 1 + max(len(_label(schedule, span.action)) for mine in timeline.spans for span in mine)
    margin = len(f"rank {schedule.ranks - 1}")
    lines = []
    for rank, mine in enumerate(timeline.spans):
        line, now = "", 0
        for span in mine:
            start, end = round(span.start), round(span.end)
            line += _idle(start - now, cell)
            line += "|" + _label(schedule, span.action).ljust(cell * (end - start) - 1)
            now = end
        line += _idle(round(timeline.makespan) - now, cell)
        lines.append(f"{f'rank {rank}':<{margin}} {line}|")
    return "\n".join(lines)


def _idle(units: int, cell: int) -> str:
    return "|" + "." * (cell * units - 1) if units else ""


def _label(schedule: Schedule, action: Action) -> str:
    return str(action) if schedule.chunks > 1 else f"{action.kind.value}{action.micro_batch}"


def svg(schedule: Schedule, timeline: Timeline) -> str:
    """The same as an SVG document; later chunks of a rank are darker, and tooltips tell stage and time."""
    scale = _CELL / min((span.end - span.start for mine in timeline.spans for span in mine), default=1.0)
    width, height = _LEFT + timeline.makespan * scale + 16, _TOP + _ROW * schedule.ranks + 16
    title = f"{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches"
    body = [f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>', *_legend(timeline)]
    for rank, mine in enumerate(timeline.spans):
        top = _TOP + _ROW * rank
        body.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        body += [_box(schedule, rank, span, top, scale) for span in mine]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _legend(timeline: Timeline) -> list[str]:
    used = {span.action.kind for mine in timeline.spans for span in mine}
    lines = []
    for place, kind in enumerate(kind for kind in Kind if kind in used):
        x = 300 + 130 * place
        lines.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 16}" y="18">{WORDS[kind]}</text>')
    return lines


def _box(schedule: Schedule, rank: int, span: Span, top: int, scale: float) -> str:
    kind, stage, micro_batch = span.action
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    chunk = schedule.stages_of(rank).index(stage)
    opacity = 1 if schedule.chunks == 1 else 0.55 + 0.45 * chunk / (schedule.chunks - 1)
    tip = f"stage {stage}, {WORDS[kind]}, micro-batch {micro_batch}, {span.start:g} to {span.end:g}"
    return (
        f'<g><title>{tip}</title><rect x="{x:g}" y="{top}" width="{width:g}" height="{_ROW - 2}" '
        f'fill="{COLOURS[kind]}" fill-opacity="{opacity:g}" stroke="#444" stroke-width="0.5"/>'
        f'<text x="{x + width / 2:g}" y="{top + 15}" text-anchor="middle">{micro_batch}</text></g>'
    )
