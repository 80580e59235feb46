"""Who meets whom: rounds of disjoint pairs in which everybody meets everybody once; free of torch.

The circle method (round-robin tournaments: Kirkman 1850): one player stays, the others turn by one place each round.
All pairs of a round measure at once, and each has its two NICs to itself, so n nodes take n - 1 rounds rather than
n(n-1)/2.
"""

from __future__ import annotations


def rounds(players: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """The rounds.

    Args:
        players: how many there are, at least 0.
        most: the first so many rounds alone; all if None.

    Returns:
        Lists of pairs (a, b) with a < b; players - 1 of them for an even number, players for an odd one, in each of
        which one rests. None for fewer than two.
    """
    if players < 2:
        return []
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    found = []
    for _ in range(len(seats) - 1 if most is None else min(most, len(seats) - 1)):
        found.append(_pairs(seats))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def partner(pairs: list[tuple[int, int]], player: int) -> int | None:
    """Whom a player meets in a round; None where it rests."""
    for a, b in pairs:
        if player in (a, b):
            return b if player == a else a
    return None


def _pairs(seats: list[int | None]) -> list[tuple[int, int]]:
    half = len(seats) // 2
    facing = zip(seats[:half], reversed(seats[half:]), strict=True)
    return [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
