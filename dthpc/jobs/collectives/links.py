"""Which node or link is slow, from the bandwidths of all pairs; free of torch.

A node whose every link is slow is to blame for them (its NIC, cable or switch port); a single slow cell between two
nodes that are quick elsewhere is a link. So a node is judged by its best links, in each direction: a good node has at
least one good link. What then still stands out among the cells of good nodes by the median absolute deviation (modified
z-score, Iglewicz and Hoaglin 1993, section 3: |z| > 3.5) and by the threshold is a link of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]

_Z = 3.5


@dataclass(frozen=True)
class Slow:
    """A member, or a link, that is slower than the others."""

    kind: str
    """`node` or `link`: a member with all its links, or one link in one or both directions."""

    members: tuple[int, ...]
    """The member; or sender and receiver."""

    direction: str
    """`both`, `sends` or `receives` for a member; `both` or `one` for a link."""

    bandwidth: float
    """What it reaches, GB/s."""

    expected: float
    """What the others reach, GB/s."""

    @property
    def ratio(self) -> float:
        """Reached over expected."""
        return self.bandwidth / self.expected if self.expected > 0 else 0.0


def find_slow(members: int, bandwidth: Mapping[Pair, float], threshold: float) -> list[Slow]:
    """What is slow in a matrix.

    Args:
        members: how many there are.
        bandwidth: GB/s from one to another, for ordered pairs; missing ones are not judged.
        threshold: part of the others' bandwidth below which something is slow.

    Returns:
        Slow members first, then single links; the slowest of each first. Nothing where all are alike, even if all are
        slow: that only the link's rate or a reference tells.
    """
    slow = _slow_members(members, bandwidth, threshold)
    blamed = {(each.members[0], each.direction) for each in slow}

    def explained(pair: Pair) -> bool:
        sender, receiver = pair
        return bool(blamed & {(sender, "both"), (sender, "sends"), (receiver, "both"), (receiver, "receives")})

    rest = {pair: value for pair, value in bandwidth.items() if not explained(pair)}
    return slow + _slow_links(rest, threshold)


def _slow_members(members: int, bandwidth: Mapping[Pair, float], threshold: float) -> list[Slow]:
    if members < 3:
        return []  # each of two has only the other to be measured by
    best = {way: _best_of(members, bandwidth, end) for end, way in enumerate(("sends", "receives"))}
    found: dict[int, list[tuple[str, float, float]]] = {}
    for way, values in best.items():
        known = [value for value in values if not math.isnan(value)]
        # Of three, one slow member leaves the others only one good link; the best of the others is what can be had.
        expected = _median(sorted(known)[len(known) // 3 :]) if known else 0.0
        for member, value in enumerate(values):
            if value < threshold * expected:
                found.setdefault(member, []).append((way, value, expected))
    slow = []
    for member, ways in found.items():
        direction = "both" if len(ways) == 2 else ways[0][0]
        lowest, expected = min(value for _, value, _ in ways), max(expected for *_, expected in ways)
        slow.append(Slow("node", (member,), direction, lowest, expected))
    return sorted(slow, key=lambda each: each.ratio)


def _best_of(members: int, bandwidth: Mapping[Pair, float], end: int) -> list[float]:
    """What each member reaches on its best link as sender (end 0) or receiver (end 1); nan where it has none."""
    return [
        max((value for pair, value in bandwidth.items() if pair[end] == member), default=math.nan)
        for member in range(members)
    ]


def _slow_links(bandwidth: Mapping[Pair, float], threshold: float) -> list[Slow]:
    values = list(bandwidth.values())
    if len(values) < 2:
        return []
    # Of two members there are two directions: the better one is what can be had, and as nothing tells how much such
    # values scatter, only half of it is slow.
    middle = max(values) if len(values) == 2 else _median(values)
    threshold = min(threshold, 0.5) if len(values) == 2 else threshold
    spread = _median([abs(value - middle) for value in values])
    slow = {
        pair: value
        for pair, value in bandwidth.items()
        if value < threshold * middle and (len(values) < 4 or 0.6745 * (middle - value) > _Z * spread)
    }
    found = []
    for (sender, receiver), value in slow.items():
        back = slow.get((receiver, sender))
        if back is None:
            found.append(Slow("link", (sender, receiver), "one", value, middle))
        elif sender < receiver:
            found.append(Slow("link", (sender, receiver), "both", min(value, back), middle))
    return sorted(found, key=lambda each: each.ratio)


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
