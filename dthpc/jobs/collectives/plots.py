"""Pictures of the results as SVG, which needs no library: bus bandwidth over size, and heat maps of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from dthpc.jobs.collectives.judge import rate
from dthpc.jobs.collectives.line import Line
from dthpc.jobs.collectives.matrix import Matrix
from dthpc.monitor.units import size

COLOURS = ("#3567a8", "#d1782b", "#3d8f5a", "#8c58a5", "#b33b45", "#6b6b6b")
"""Of backends, in order."""

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 130, 56, 60, 64
_COLUMNS = 3


def bandwidth_svg(title: str, lines: Sequence[Line], link_gbps: float | None) -> str:
    """Bus bandwidth over size, both logarithmic: a panel for each operation, a curve for each backend.

    Args:
        title: what is shown.
        lines: of one group, with at least one of more than 0 bytes.
        link_gbps: rate of the link, drawn as a dashed line where it is known.
    """
    moved = [line for line in lines if line.busbw > 0 and line.operation != "ping_pong"]
    operations = list(dict.fromkeys(line.operation for line in moved))
    backends = list(dict.fromkeys(line.backend for line in moved))
    link = link_gbps / 8 if link_gbps is not None else None
    across = any(line.link_load for line in moved)
    axes = _Axes(moved, link if across else None)
    columns = min(_COLUMNS, len(operations))
    rows = -(-len(operations) // _COLUMNS)
    width, height = columns * (_WIDTH + _GAP) + 24, _TOP + rows * (_HEIGHT + _GAP)
    body = [_text(12, 20, title, bold=True), *_legend(backends)]
    for number, operation in enumerate(operations):
        x = _LEFT + number % _COLUMNS * (_WIDTH + _GAP)
        y = _TOP + number // _COLUMNS * (_HEIGHT + _GAP)
        panel = [line for line in moved if line.operation == operation]
        body.append(f'<g transform="translate({x} {y})">')
        body += [
            *axes.frame(operation),
            *(_curve(panel, name, place, axes) for place, name in enumerate(backends)),
            "</g>",
        ]
    return _document(width, height, body)


class _Axes:
    """Where sizes and bandwidths lie in a panel."""

    def __init__(self, lines: Sequence[Line], link: float | None) -> None:
        sizes, values = [line.size for line in lines], [line.busbw for line in lines]
        values += [link] if link is not None else []
        self.link = link
        self.low_x, self.high_x = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
        self.low_y, self.high_y = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.high_x, self.high_y = max(self.high_x, self.low_x + 1), max(self.high_y, self.low_y + 1)

    def x(self, value: float) -> float:
        return _WIDTH * (math.log2(value) - self.low_x) / (self.high_x - self.low_x)

    def y(self, value: float) -> float:
        return _HEIGHT * (1 - (math.log10(value) - self.low_y) / (self.high_y - self.low_y))

    def frame(self, title: str) -> list[str]:
        """Border, grid and labels."""
        parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>']
        parts.append(_text(0, -6, f"{title}: busbw over size", bold=True))
        for power in range(self.low_y, self.high_y + 1):
            y = self.y(10.0**power)
            parts.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#ddd"/>')
            parts.append(_text(-4, y + 4, rate(10.0**power), anchor="end"))
        step = max(1, (self.high_x - self.low_x) // 5)
        for power in range(self.low_x, self.high_x + 1, step):
            x = self.x(2.0**power)
            parts.append(f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="#eee"/>')
            parts.append(_text(x, _HEIGHT + 14, _short(2**power), anchor="middle"))
        if self.link is not None:
            y = self.y(self.link)
            dashed = 'stroke="#000" stroke-dasharray="5 3"'
            parts.append(f'<path d="M0 {y:.1f}H{_WIDTH}" {dashed}><title>the link, {rate(self.link)}</title></path>')
        return parts


def _curve(panel: Sequence[Line], backend: str, place: int, axes: _Axes) -> str:
    """The better form of each size; points tell their values."""
    best: dict[int, Line] = {}
    for line in panel:
        if line.backend == backend and (line.size not in best or line.busbw > best[line.size].busbw):
            best[line.size] = line
    if not best:
        return ""
    points = [(axes.x(bytes_), axes.y(line.busbw), line) for bytes_, line in sorted(best.items())]
    colour = COLOURS[place % len(COLOURS)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{escape(backend)} {size(line.size)}: '
        f"{rate(line.busbw)}, {line.p50_us:.1f} µs</title></circle>"
        for x, y, line in points
    )
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


def _legend(backends: Sequence[str]) -> list[str]:
    parts = []
    for place, name in enumerate(backends):
        x = 12 + 110 * place
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(_text(x + 16, 38, name))
    return parts


def pairs_svg(matrix: Matrix) -> str:
    """Bandwidth from each member (rows) to each (columns), dark is quick; slow ones have a red border."""
    members = len(matrix.labels)
    cell = 64 if members <= 12 else 24 if members <= 48 else 10
    left, top = 16 + 7 * max(map(len, matrix.labels)), 56
    largest = max(matrix.bandwidth.values(), default=1.0)
    body = [_text(12, 20, f"Bandwidth of pairs, {matrix.name}, {matrix.backend}, {size(matrix.size)}", bold=True)]
    for place, label in enumerate(matrix.labels):
        body.append(_text(left - 6, top + cell * place + cell / 2 + 4, label, anchor="end"))
        x = left + cell * place + cell / 2
        turn = f' transform="rotate(-30 {x:g} {top - 6})"' if cell < 64 else ""
        body.append(f'<text x="{x:g}" y="{top - 6}" text-anchor="middle"{turn}>{escape(label)}</text>')
    for (a, b), value in sorted(matrix.bandwidth.items()):
        body.append(_heat(matrix, a, b, value / largest, left + cell * b, top + cell * a, cell))
    return _document(left + cell * members + 16, top + cell * members + 16, body)


def _heat(matrix: Matrix, a: int, b: int, share: float, x: float, y: float, cell: int) -> str:
    # From nearly white to a dark blue, straight in each channel.
    red, green, blue = (round(high + (low - high) * share) for high, low in ((247, 8), (251, 81), (255, 156)))
    value = matrix.bandwidth[a, b]
    slow = any(_concerns(each.kind, each.members, each.direction, a, b) for each in matrix.slow)
    border = ' stroke="#d40000" stroke-width="3"' if slow else ' stroke="#fff"'
    tip = f"{matrix.labels[a]} to {matrix.labels[b]}: {rate(value)}"
    latency = matrix.latency_us.get((min(a, b), max(a, b)))
    tip += f", {latency:.1f} µs" if latency is not None else ""
    ink = "#fff" if share > 0.5 else "#000"
    number, _, unit = rate(value).partition(" ")
    middle, height = x + cell / 2, y + cell / 2
    told = (
        f'<text x="{middle:g}" y="{height:g}" text-anchor="middle" fill="{ink}">{number}</text>'
        f'<text x="{middle:g}" y="{height + 13:g}" text-anchor="middle" fill="{ink}">{unit}</text>'
        if cell >= 64
        else ""
    )
    place = f'x="{x + 2:g}" y="{y + 2:g}" width="{cell - 4}" height="{cell - 4}"'
    box = f'<rect {place} fill="rgb({red},{green},{blue})"{border}/>'
    return f"<g><title>{escape(tip)}</title>{box}{told}</g>"


def _concerns(kind: str, members: tuple[int, ...], direction: str, a: int, b: int) -> bool:
    if kind == "node":
        ends = {"both": (a, b), "sends": (a,), "receives": (b,)}[direction]
        return members[0] in ends
    return (a, b) == members or (direction == "both" and (b, a) == members)


def _short(bytes_: int) -> str:
    return size(bytes_).replace(".00", "").replace(".0", "").replace(" ", "").replace("iB", "")


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _document(width: float, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
