"""Every member with every other: bandwidth each way and latency, in rounds of disjoint pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from dthpc.jobs.collectives.control import Control
from dthpc.jobs.collectives.drivers import MessageDriver
from dthpc.jobs.collectives.groups import Place
from dthpc.jobs.collectives.line import median
from dthpc.jobs.collectives.links import find_slow
from dthpc.jobs.collectives.matrix import Matrix
from dthpc.jobs.collectives.settings import Settings
from dthpc.jobs.collectives.tournament import partner, rounds

PINGS = 20
"""Round trips behind a latency."""

FEWEST, MOST = 3, 20
"""Messages behind a bandwidth."""

LOOKS = 3
"""How often all pairs meet while something looks slow."""

_Known = dict[tuple[int, int], tuple[float, float | None]]


def member_sets(places: Sequence[Place], pairs: str) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """What matrices are measured, one after the other.

    Args:
        places: of all ranks.
        pairs: `job.pairs`.

    Returns:
        For each, its kind, and the matrices that are measured at the same time: name and ranks of the members.
    """
    firsts = [rank for rank, place in enumerate(places) if place.local == 0]
    by_node: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        by_node.setdefault(place.node, []).append(rank)
    found: list[tuple[str, list[tuple[str, list[int]]]]] = []
    if pairs in ("auto", "nodes", "both") and len(firsts) > 1:
        found.append(("nodes", [("nodes", firsts)]))
    inside = [(f"ranks of {places[ranks[0]].host}", ranks) for ranks in by_node.values() if len(ranks) > 1]
    if pairs in ("auto", "ranks", "both") and inside:
        found.append(("ranks", inside))
    return found


def measure_pairs(
    driver: MessageDriver,
    kind: str,
    sets: Sequence[tuple[str, list[int]]],
    places: Sequence[Place],
    control: Control,
    settings: Settings,
) -> list[Matrix]:
    """Measure matrices at the same time; collective over all ranks, those that are in none included.

    While something looks slow, all is measured again, and the better of the times counts: what else the machines do at
    a moment passes, and a slow link stays slow.

    Args:
        driver: the library, among all ranks.
        kind: `nodes` or `ranks`: what members are called.
        sets: name and ranks of each matrix; no rank is in two of them.
        places: of all ranks.
        control: all ranks.
        settings: the job's.
    """
    best: _Known = {}
    matrices: list[Matrix] = []
    for _ in range(LOOKS):
        for pair, (bandwidth, latency) in _tournament(driver, [ranks for _, ranks in sets], control, settings).items():
            before = best.get(pair, (0.0, latency))
            quicker = [each for each in (before[1], latency) if each is not None]
            best[pair] = max(before[0], bandwidth), min(quicker, default=None)
        matrices = [_matrix(name, kind, ranks, best, driver, places, settings) for name, ranks in sets]
        # All ranks hold the same numbers here, so that all come to the same decision.
        if not any(matrix.slow for matrix in matrices):
            break
    return matrices


def _tournament(driver: MessageDriver, sets: Sequence[list[int]], control: Control, settings: Settings) -> _Known:
    """One meeting of all pairs: GB/s from one rank to another, and seconds of latency where the first one told it."""
    mine = next((ranks for ranks in sets if control.rank in ranks), [])
    schedule = rounds(len(mine))
    message, short = torch.zeros(settings.pair_size, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    found: list[tuple[int, int, float, float | None]] = []
    for number in range(max(len(rounds(len(ranks))) for ranks in sets)):
        # Nobody begins a round before all have ended the last: a pair must have its links to itself.
        control.barrier()
        control.end_if_asked()
        me = mine.index(control.rank) if mine else -1
        other = partner(schedule[number], me) if number < len(schedule) else None
        if other is not None:
            found.append(_meet(driver, mine[other], me < other, message, short, settings))
    return {(a, b): (bandwidth, latency) for part in control.gather(found) for a, b, bandwidth, latency in part}


def _meet(
    driver: MessageDriver, peer: int, first: bool, message: torch.Tensor, short: torch.Tensor, settings: Settings
) -> tuple[int, int, float, float | None]:
    """What this rank reaches towards another: latency together, then the first sends, then the other."""
    latency = _ping(driver, peer, first, short)
    bandwidth = 0.0
    for sends in (first, not first):
        reached = _stream(driver, peer, sends, message, short, settings.seconds)
        bandwidth = reached if sends else bandwidth
    own = torch.distributed.get_rank()
    return own, peer, bandwidth, latency if first else None


def _ping(driver: MessageDriver, peer: int, first: bool, short: torch.Tensor) -> float:
    """Seconds of half a round trip: the median, the first of all not counted."""
    times = []
    for _ in range(PINGS + 1):
        began = time.perf_counter()
        _trade(driver, peer, first, short)
        times.append((time.perf_counter() - began) / 2)
    return median(times[1:])


def _trade(driver: MessageDriver, peer: int, first: bool, short: torch.Tensor) -> None:
    if first:
        driver.send(short, peer)
        driver.receive(short, peer)
    else:
        driver.receive(short, peer)
        driver.send(short, peer)


def _stream(
    driver: MessageDriver, peer: int, sends: bool, message: torch.Tensor, short: torch.Tensor, seconds: float
) -> float:
    """GB/s of the quickest of some messages, each of which is confirmed; nought for the receiver.

    The quickest, because what else the machines do can only slow a message down, and a slow link slows all of them.
    """
    answer = torch.zeros(8, dtype=torch.uint8)
    best, began = 0.0, time.perf_counter()
    for number in range(MOST):
        if not sends:
            driver.receive(message, peer)
            driver.send(short, peer)
            driver.receive(answer, peer)
            if answer[0]:
                break
            continue
        start = time.perf_counter()
        driver.send(message, peer)
        driver.receive(short, peer)
        best = max(best, message.nbytes / (time.perf_counter() - start) / 1e9)
        done = number + 1 >= FEWEST and time.perf_counter() - began > seconds
        answer.fill_(int(done or number + 1 == MOST))
        driver.send(answer, peer)
        if done:
            break
    return best


def _matrix(
    name: str,
    kind: str,
    ranks: list[int],
    known: _Known,
    driver: MessageDriver,
    places: Sequence[Place],
    settings: Settings,
) -> Matrix:
    label: Callable[[int], str] = (lambda rank: places[rank].host) if kind == "nodes" else (lambda rank: f"rank {rank}")
    matrix = Matrix(name, [label(rank) for rank in ranks], driver.name, settings.pair_size)
    for a, sender in enumerate(ranks):
        for b, receiver in enumerate(ranks):
            if (sender, receiver) in known:
                bandwidth, latency = known[sender, receiver]
                matrix.bandwidth[a, b] = bandwidth
                if latency is not None:
                    matrix.latency_us[min(a, b), max(a, b)] = 1e6 * latency
    matrix.slow = find_slow(len(ranks), matrix.bandwidth, settings.slow)
    return matrix
