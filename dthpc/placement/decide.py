"""The decision: for each rank of a node its GPU, the cores and memory nearest to it, and its NICs, with the reasons.

The order is that of dependence: what may be used, which rank gets which GPU, which cores are nearest to that, how they
are shared, and what memory and NICs go with them. The same topology and wish always give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dthpc.placement.cpuset import CpuSet
from dthpc.placement.plan.cores import CoreSeat, Seats, seats_of
from dthpc.placement.plan.dealing import Share, deal_cores
from dthpc.placement.plan.memory import memory_of
from dthpc.placement.plan.nics import Sender, deal_nics
from dthpc.placement.plan.order import deal_units
from dthpc.placement.plan.places import NicChoice, NodePlan, RankPlace, Unit
from dthpc.placement.plan.sound import demand_sound
from dthpc.placement.plan.units import share_out, units_of
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Topology


def decide(topology: Topology, wish: Wish) -> NodePlan:
    """Place the ranks of one node.

    Raises:
        UserError: the topology contradicts itself, or the wish does not fit the node: more GPUs than visible, ranks
            without equal shares of them, a mask outside of what may be used, nothing left after what is reserved.
    """
    demand_sound(topology)
    # Ranks without GPUs do not care which are visible: the variable may name some that were not even read.
    units = [] if wish.gpus == 0 else units_of(topology, max(wish.ranks, wish.gpus or 0), wish.visible)
    count, remark = share_out(wish.ranks, wish.gpus, units)
    given = deal_units(topology, units, wish.ranks, count, wish.axes)
    moved = [unit for own in given for unit in own] != [unit for unit in units if any(unit in own for own in given)]
    seats = seats_of(topology, wish.allowed, wish.reserved, wish.reserve)
    shares = [] if seats is None else deal_cores(topology, seats, given, wish.cores_per_rank)
    places = [
        _place(topology, wish, rank, own, shares[rank] if shares else None, seats, count, moved)
        for rank, own in enumerate(given)
    ]
    senders = [Sender(place.local_rank, place.units, place.memory) for place in places]
    nics, of_nics = deal_nics(topology, senders, wish.nics)
    placed = tuple(_with_nics(place, *nics[place.local_rank]) for place in places)
    notes = [remark] if remark else []
    if seats is not None:
        notes += [*_costs(wish, seats, shares), *seats.notes]
    used: CpuSet = frozenset().union(*(place.cpus or () for place in placed))
    return NodePlan(
        placed,
        spare=_first_threads(seats) - used,
        reserved=seats.reserved if seats is not None else frozenset(),
        crowded=any(share.shared for share in shares),
        notes=(*notes, *of_nics),
    )


def _place(
    topology: Topology,
    wish: Wish,
    rank: int,
    units: tuple[Unit, ...],
    share: Share | None,
    seats: Seats | None,
    used: int,
    moved: bool,
) -> RankPlace:
    gpu = units[0].gpu if units else None
    memory, of_memory = memory_of(topology, share.cores if share else (), gpu)
    why = {"gpu": _why_gpu(wish, units, used, moved), "memory": of_memory}
    if share is None or seats is None:
        return RankPlace(rank, units, memory=memory, why={**why, "cores": "no CPUs are told, so that none are bound"})
    cpus, compute, helpers = _threads(share.cores, wish, bool(units), seats.known)
    near = frozenset(cpu for core in share.home for cpu in core.threads)
    crowd = f"; {share.shared} ranks share it" if share.shared else ""
    return RankPlace(
        rank,
        units,
        cpus=cpus,
        compute=compute,
        helpers=helpers,
        cores=0 if share.shared else len(share.cores),
        near=near,
        memory=memory,
        why={**why, "cores": f"{len(share.cores)} of {len(share.home)} {_home_word(share)}{crowd}"},
    )


def _home_word(share: Share) -> str:
    return share.why if share.why.startswith("cores") else f"cores: {share.why}"


def _with_nics(place: RankPlace, nics: tuple[NicChoice, ...], why: str) -> RankPlace:
    return replace(place, nics=nics, why={**place.why, "nic": why})


def _why_gpu(wish: Wish, units: Sequence[Unit], used: int, moved: bool) -> str:
    if not units:
        return "no GPU is used" if wish.gpus == 0 else "no GPU is there"
    if used < wish.ranks:
        return f"shared: {used} for {wish.ranks} ranks, neighbours together"
    if moved:
        names = ", ".join(name for name, _ in wish.axes)
        return f"ordered so that ranks that talk most ({names}) sit nearest"
    return "by number" if len(units) == 1 else f"{len(units)} each, by number"


def _threads(cores: Sequence[CoreSeat], wish: Wish, with_gpu: bool, known: bool) -> tuple[CpuSet, CpuSet, CpuSet]:
    """All CPUs of a rank, those for computing and those for helpers."""
    one = wish.smt != "all" and known
    asked = wish.helpers
    count = len(cores) // (4 if with_gpu else 16) if asked is None else min(asked, len(cores) - 1)
    if wish.smt == "spread" and known and all(len(core.threads) > 1 for core in cores):
        compute = frozenset(core.threads[0] for core in cores)
        helpers = frozenset(core.threads[1] for core in cores[-count:]) if count else frozenset()
        return compute | helpers, compute, helpers
    split = len(cores) - count
    parts = [
        frozenset(cpu for core in some for cpu in (core.threads[:1] if one else core.threads))
        for some in (cores[:split], cores[split:])
    ]
    return parts[0] | parts[1], parts[0], parts[1]


def _costs(wish: Wish, seats: Seats, shares: Sequence[Share]) -> list[str]:
    ranks, cores = len(shares), len(seats.cores)
    notes = []
    worst = max((share.shared for share in shares), default=0)
    if worst:
        notes.append(
            f"{ranks} ranks on {cores} cores: up to {worst} take turns on one, so that a step takes about "
            f"{worst} times as long as with a core each"
        )
    short = [share for share in shares if wish.cores_per_rank and len(share.cores) < wish.cores_per_rank]
    if short and not worst:
        fewest = min(len(share.cores) for share in short)
        notes.append(
            f"{wish.cores_per_rank} cores a rank were asked; {len(short)} of {ranks} get fewer, down to {fewest}"
        )
    away = [share for share in shares if "may not be used" in share.why]
    if away:
        ranks_away = ", ".join(str(share.rank) for share in away)
        notes.append(f"ranks {ranks_away} run away from their GPU: its cores may not be used here")
    return notes


def _first_threads(seats: Seats | None) -> CpuSet:
    return frozenset() if seats is None else frozenset(core.threads[0] for core in seats.cores)
