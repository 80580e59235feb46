"""How each operation is called, and what must come out on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.conformance.cases import Case
from tests.comm.conformance.values import empty, exact, reduced, shape_of, tensor, values


@dataclass
class Called:
    """A call that was made: what to wait for, and pairs of what came out and what should."""

    works: list[Any]
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    """What must not be freed before the end, as it is still sent."""


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    group: Any
    ranks: list[int]
    rank: int
    """In the group."""

    @property
    def size(self) -> int:
        """Number of the group's ranks."""
        return len(self.ranks)


def call(case: Case, place: Place) -> Called:
    """Make a case's call on this rank."""
    return _CALLS[case.operation](case, place)


def _options(case: Case, place: Place) -> dict[str, Any]:
    return {"group": place.group, "async_op": case.asynchronous}


def _reduction(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.reduction)


def _called(work: Any, pairs: list[tuple[Tensor, Tensor]], *kept: Any) -> Called:
    return Called([] if work is None else [work], pairs, list(kept))


def _all_reduce(case: Case, at: Place) -> Called:
    mine = tensor(case, values(case, at.rank))
    work = dist.all_reduce(mine, _reduction(case), **_options(case, at))
    return _called(work, [(mine, reduced(case, [values(case, member) for member in range(at.size)]))])


def _all_reduce_coalesced(case: Case, at: Place) -> Called:
    mine = [tensor(case, values(case, at.rank, index)) for index in range(3)]
    with dist._coalescing_manager(group=at.group, async_ops=case.asynchronous) as manager:
        for one in mine:
            dist.all_reduce(one, _reduction(case), group=at.group)
    expected = [reduced(case, [values(case, member, index) for member in range(at.size)]) for index in range(3)]
    return Called([manager] if case.asynchronous else [], list(zip(mine, expected, strict=True)))


def _reduce(case: Case, at: Place) -> Called:
    root = case.root % at.size
    mine = tensor(case, values(case, at.rank))
    work = dist.reduce(mine, group_dst=root, op=_reduction(case), **_options(case, at))
    expected = reduced(case, [values(case, member) for member in range(at.size)])
    return _called(work, [(mine, expected)] if at.rank == root else [])


def _reduce_scatter(case: Case, at: Place) -> Called:
    shapes = [shape_of(case, peer) for peer in range(at.size)]
    shares = [tensor(case, values(case, at.rank, peer, shapes[peer])) for peer in range(at.size)]
    out = empty(case, shapes[at.rank])
    work = dist.reduce_scatter(out, shares, _reduction(case), **_options(case, at))
    operands = [values(case, member, at.rank, shapes[at.rank]) for member in range(at.size)]
    return _called(work, [(out, reduced(case, operands))], shares)


def _rows(case: Case, at: Place) -> tuple[int, ...]:
    return (case.shape[0] * at.size, *case.shape[1:]) if case.shape else (at.size,)


def _reduce_scatter_single(case: Case, at: Place) -> Called:
    whole = _rows(case, at)
    flat, out = tensor(case, values(case, at.rank, 0, whole)), empty(case, (whole[0] // at.size, *whole[1:]))
    work = dist.reduce_scatter_single(out, flat, _reduction(case), **_options(case, at))
    parts = [np.split(values(case, member, 0, whole), at.size)[at.rank] for member in range(at.size)]
    return _called(work, [(out, reduced(case, parts))], flat)


def _broadcast(case: Case, at: Place) -> Called:
    root = case.root % at.size
    mine = tensor(case, values(case, at.rank))
    work = dist.broadcast(mine, group_src=root, **_options(case, at))
    return _called(work, [(mine, exact(case, values(case, root)))])


def _all_gather(case: Case, at: Place) -> Called:
    outs = [empty(case, shape_of(case, member)) for member in range(at.size)]
    mine = tensor(case, values(case, at.rank, 0, shape_of(case, at.rank)))
    work = dist.all_gather(outs, mine, **_options(case, at))
    expected = [exact(case, values(case, member, 0, shape_of(case, member))) for member in range(at.size)]
    return _called(work, list(zip(outs, expected, strict=True)), mine)


def _all_gather_single(case: Case, at: Place) -> Called:
    shape = case.shape or (1,)
    out, mine = empty(case, (shape[0] * at.size, *shape[1:])), tensor(case, values(case, at.rank, 0, shape))
    work = dist.all_gather_single(out, mine, **_options(case, at))
    whole = np.concatenate([values(case, member, 0, shape) for member in range(at.size)])
    return _called(work, [(out, exact(case, whole))], mine)


def _all_gather_coalesced(case: Case, at: Place) -> Called:
    outs = [[empty(case, case.shape) for _ in range(2)] for _ in range(at.size)]
    mine = [tensor(case, values(case, at.rank, index)) for index in range(2)]
    work = dist.all_gather_coalesced(outs, mine, **_options(case, at))
    pairs = [(outs[member][i], exact(case, values(case, member, i))) for member in range(at.size) for i in range(2)]
    return _called(work, pairs, mine)


def _gather(case: Case, at: Place) -> Called:
    root = case.root % at.size
    outs = [empty(case, shape_of(case, member)) for member in range(at.size)] if at.rank == root else None
    mine = tensor(case, values(case, at.rank, 0, shape_of(case, at.rank)))
    work = dist.gather(mine, outs, group_dst=root, **_options(case, at))
    expected = [exact(case, values(case, member, 0, shape_of(case, member))) for member in range(at.size)]
    return _called(work, list(zip(outs or [], expected, strict=False)), mine)


def _scatter(case: Case, at: Place) -> Called:
    root = case.root % at.size
    shapes = [shape_of(case, member) for member in range(at.size)]
    shares = [tensor(case, values(case, root, peer, shapes[peer])) for peer in range(at.size)]
    out = empty(case, shapes[at.rank])
    work = dist.scatter(out, shares if at.rank == root else None, group_src=root, **_options(case, at))
    return _called(work, [(out, exact(case, values(case, root, at.rank, shapes[at.rank])))], shares)


def _all_to_all(case: Case, at: Place) -> Called:
    shares = [tensor(case, values(case, at.rank, peer, shape_of(case, at.rank, peer))) for peer in range(at.size)]
    shapes = [shape_of(case, member, at.rank) for member in range(at.size)]
    outs = [empty(case, shape) for shape in shapes]
    work = dist.all_to_all(outs, shares, **_options(case, at))
    expected = [exact(case, values(case, member, at.rank, shapes[member])) for member in range(at.size)]
    return _called(work, list(zip(outs, expected, strict=True)), shares)


def _all_to_all_single(case: Case, at: Place) -> Called:
    given = [shape_of(case, at.rank, peer) or (1,) for peer in range(at.size)]
    taken = [shape_of(case, member, at.rank) or (1,) for member in range(at.size)]
    flat = tensor(case, np.concatenate([values(case, at.rank, peer, given[peer]) for peer in range(at.size)]))
    out = empty(case, (sum(shape[0] for shape in taken), *taken[0][1:]))
    splits = ([shape[0] for shape in taken], [shape[0] for shape in given]) if case.uneven else (None, None)
    work = dist.all_to_all_single(out, flat, *splits, **_options(case, at))
    whole = np.concatenate([values(case, member, at.rank, taken[member]) for member in range(at.size)])
    return _called(work, [(out, exact(case, whole))], flat)


def _ring(case: Case, at: Place) -> Called:
    """Two messages of different tags to the next rank, received in the other order."""
    following, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    mine = [tensor(case, values(case, at.rank, index)) for index in range(2)]
    theirs = [empty(case, case.shape) for _ in range(2)]
    tags = [case.seed % 1000, case.seed % 1000 + 1]
    works: list[Any] = [
        dist.isend(mine[index], group=at.group, group_dst=following, tag=tags[index]) for index in range(2)
    ]
    for index in (1, 0):
        if case.asynchronous:
            works.append(dist.irecv(theirs[index], group=at.group, group_src=before, tag=tags[index]))
        else:
            assert dist.recv(theirs[index], group=at.group, group_src=before, tag=tags[index]) == at.ranks[before]
    return Called(works, [(theirs[index], exact(case, values(case, before, index))) for index in range(2)], mine)


def _any_source(case: Case, at: Place) -> Called:
    """Everybody sends to the root, which learns from whom each came."""
    root, tag = case.root % at.size, case.seed % 1000
    if at.rank != root:
        mine = tensor(case, values(case, at.rank))
        return Called([dist.isend(mine, group=at.group, group_dst=root, tag=tag)], [], [mine])
    pairs, seen = [], set()
    for _ in range(at.size - 1):
        theirs = empty(case, case.shape)
        sender = dist.recv(theirs, group=at.group, tag=tag)
        seen.add(sender)
        pairs.append((theirs, exact(case, values(case, at.ranks.index(sender)))))
    assert seen == set(at.ranks) - {at.ranks[root]}, f"messages came from {seen}"
    return Called([], pairs)


def _batch(case: Case, at: Place) -> Called:
    following, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    mine, theirs = tensor(case, values(case, at.rank)), empty(case, case.shape)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, theirs, group=at.group, group_peer=before),
            dist.P2POp(dist.isend, mine, group=at.group, group_peer=following),
        ]
    )
    return Called(works, [(theirs, exact(case, values(case, before)))], [mine])


def _barrier(case: Case, at: Place) -> Called:
    return _called(dist.barrier(**_options(case, at)), [])


def _objects(case: Case, at: Place) -> Called:
    root = case.root % at.size
    everything = [(member, case.seed) for member in range(at.size)]
    gathered: list[Any] = [None] * at.size
    dist.all_gather_object(gathered, everything[at.rank], group=at.group)
    assert gathered == everything
    told: list[Any] = [everything if at.rank == root else None, root]
    dist.broadcast_object_list(told, group_src=root, group=at.group)
    assert told == [everything, root]
    collected: list[Any] | None = [None] * at.size if at.rank == root else None
    dist.gather_object(everything[at.rank], collected, group_dst=root, group=at.group)
    assert collected == (everything if at.rank == root else None)
    given: list[Any] = [None]
    dist.scatter_object_list(given, everything if at.rank == root else None, group_src=root, group=at.group)
    assert given == [everything[at.rank]]
    return Called([])


_CALLS: dict[str, Callable[[Case, Place], Called]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
    "any_source": _any_source,
    "batch": _batch,
    "barrier": _barrier,
    "objects": _objects,
}


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same numbers; a negative zero is one."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype.is_floating_point and found.itemsize == 1:
        found, expected = found.float(), expected.float()
    return torch.equal(found, expected)
