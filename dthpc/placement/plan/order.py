"""Which rank gets which GPU, so that ranks that talk most sit on GPUs that reach each other best."""

from __future__ import annotations

from collections.abc import Sequence

from dthpc.placement.plan.places import Unit
from dthpc.placement.plan.wish import talk
from dthpc.placement.topology import Topology

_LEVEL = {"PIX": 80, "PXB": 96, "PHB": 112, "NODE": 128, "SYS": 192}
_UNKNOWN = 160
_MOST_UNITS = 24
"""Beyond this (pieces of GPUs) the order is kept: pieces reach each other through host memory anyway."""

_MOST_STARTS = 8

Matrix = list[list[int]]


def deal_units(
    topology: Topology, units: Sequence[Unit], ranks: int, count: int, axes: Sequence[tuple[str, int]]
) -> list[tuple[Unit, ...]]:
    """The units of each local rank.

    In the order of the vendor's tools unless another order brings ranks that talk nearer to each other; equal shares,
    and neighbouring ranks share a unit where there are fewer units than ranks.

    Args:
        topology: of the node.
        units: what may be given, in order.
        ranks: number of ranks.
        count: number of units to give out, at most `len(units)`.
        axes: axes of the layout with degrees, innermost first.
    """
    if count == 0:
        return [()] * ranks
    slots = _ranks_of_slots(ranks, count)
    weights = [[0 if s == t else _slot_talk(slots[s], slots[t], axes) for t in range(count)] for s in range(count)]
    order = _best_order(weights, _distances(topology, units), count) if len(units) <= _MOST_UNITS else range(count)
    given: list[list[Unit]] = [[] for _ in range(ranks)]
    for slot, unit in enumerate(order):
        for rank in slots[slot]:
            given[rank].append(units[unit])
    return [tuple(each) for each in given]


def distance(topology: Topology, a: Unit, b: Unit, lanes: int = 0) -> int:
    """How far apart two units are; only comparisons mean anything. `lanes`: of the broadest NVLink of the node."""
    if a.gpu.key == b.gpu.key:
        return 0
    link = topology.link(a.gpu.key, b.gpu.key)
    if link is not None and link.kind is not None:
        narrower = max(0, lanes - (link.lanes or lanes))
        return 16 * (link.hops or 1) + 2 * narrower
    if a.gpu.module is not None and a.gpu.module == b.gpu.module:
        return 8
    return _LEVEL.get(topology.level(a.gpu, b.gpu) or "", _UNKNOWN)


def _ranks_of_slots(ranks: int, count: int) -> list[list[int]]:
    """Ranks that use each slot: several where ranks share, one where a rank has several slots."""
    if count >= ranks:
        return [[slot * ranks // count] for slot in range(count)]
    return [[rank for rank in range(ranks) if rank * count // ranks == slot] for slot in range(count)]


def _slot_talk(a: Sequence[int], b: Sequence[int], axes: Sequence[tuple[str, int]]) -> int:
    if a == b:
        return 1 << 16  # two GPUs of one rank
    return sum(talk(x, y, axes) for x in a for y in b)


def _distances(topology: Topology, units: Sequence[Unit]) -> Matrix:
    lanes = max((link.lanes or 0 for link in topology.links or ()), default=0)
    return [[distance(topology, a, b, lanes) for b in units] for a in units]


def _best_order(weights: Matrix, distances: Matrix, count: int) -> Sequence[int]:
    """Which unit stands at each slot: the given order, unless a greedy one, improved by swaps, costs less."""
    best: Sequence[int] = range(count)
    different = {distances[a][b] for a in range(len(distances)) for b in range(a)}
    if len(different) <= 1 or not any(map(any, weights)):
        return best
    cost = _cost(weights, distances, best)
    for start in range(min(len(distances), _MOST_STARTS)):
        order = _swapped(weights, distances, _greedy(weights, distances, count, start))
        if (price := _cost(weights, distances, order)) < cost:
            best, cost = order, price
    return best


def _greedy(weights: Matrix, distances: Matrix, count: int, start: int) -> list[int]:
    order = [start]
    while len(order) < count:
        slot = len(order)
        free = [unit for unit in range(len(distances)) if unit not in order]
        order.append(
            min(
                free,
                key=lambda unit: (
                    sum(weights[slot][other] * distances[unit][order[other]] for other in range(slot)),
                    unit,
                ),
            )
        )
    return order


def _swapped(weights: Matrix, distances: Matrix, order: list[int]) -> list[int]:
    cost = _cost(weights, distances, order)
    better = True
    while better:
        better = False
        for a in range(len(order)):
            for b in range(a):
                order[a], order[b] = order[b], order[a]
                price = _cost(weights, distances, order)
                if price < cost:
                    cost, better = price, True
                else:
                    order[a], order[b] = order[b], order[a]
    return order


def _cost(weights: Matrix, distances: Matrix, order: Sequence[int]) -> int:
    return sum(
        weights[s][t] * distances[order[s]][order[t]] for s in range(len(order)) for t in range(s) if weights[s][t]
    )
