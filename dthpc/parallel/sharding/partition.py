"""Which parameters share a bucket: a function of the parameters alone, never of timing or of earlier steps.

torch's DistributedDataParallel lays its buckets out anew after the first step of a process, in the order in which the
gradients came. A ring all-reduce adds each element in an order that depends on its place in the bucket, so with three
ranks or more a resumed run differs in the last bits from one that was never stopped (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dthpc.parallel.parts import Part, Parts
from dthpc.parallel.sharding.bucket import Kind
from dthpc.parallel.sharding.options import ShardOptions

FIRST_BUCKET = 1 << 20
"""The first bucket to be ready is closed at as many bytes, so that communication starts early."""

ALONE = 128 << 10
"""With ZeRO 2 and 3 on the CPU, a parameter of which each data-parallel rank has as many bytes is a bucket by itself:
its gradient need not be copied, nor room be taken for it. Else fewer and larger messages cost less than the copies."""

Group = tuple[Kind, list[tuple[nn.Parameter, Part]]]


def partition(
    chunks: Sequence[nn.Module],
    parts: Parts,
    options: ShardOptions,
    ranks: int = 1,
    unit_of: Callable[[nn.Parameter], int] | None = None,
) -> list[Group]:
    """Parameters to train in buckets, in the order in which their gradients are expected to be complete.

    Args:
        chunks: this rank's chunks of layers, in order.
        parts: what their parameters are.
        options: bucket size and storage.
        ranks: data-parallel degree.
        unit_of: for ZeRO-3, the unit that gathers a parameter; units are not divided.
    """
    users: dict[nn.Parameter, list[int]] = {}
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                users.setdefault(parameter, []).append(number)
    closed: list[tuple[int, Group]] = []
    open_groups: dict[Kind, list[nn.Parameter]] = {}
    last_place: dict[Kind, int] = {}
    first: Kind | None = None

    def close(kind: Kind) -> None:
        members = open_groups.pop(kind)
        closed.append((last_place.pop(kind), (kind, [(member, parts[member]) for member in members])))

    for place, (parameter, numbers) in enumerate(reversed(users.items())):
        kind = _kind(parameter, parts[parameter], tuple(numbers), options, unit_of)
        first = first or kind
        if options.zero > 1 and kind.unit is None and kind.tied is None and _stands_alone(parameter, kind, ranks):
            closed.append((place, (kind, [(parameter, parts[parameter])])))
            continue
        open_groups.setdefault(kind, []).append(parameter)
        last_place[kind] = place
        # No other kind may move the bounds of one that tensor-parallel ranks must lay out alike.
        early = kind == first and all(group[0] != kind for _, group in closed)
        limit = min(options.bucket_bytes, FIRST_BUCKET) if early else options.bucket_bytes
        filled = sum(member.numel() for member in open_groups[kind]) * kind.dtype.itemsize
        # A tied bucket must look alike on both stages, whatever else they hold.
        if kind.unit is None and kind.tied is None and filled >= limit:
            close(kind)
    for kind in list(open_groups):
        close(kind)
    groups = [group for _, group in sorted(closed, key=lambda entry: entry[0])]
    for kind, members in groups:
        if kind.tied is not None:
            members.sort(key=lambda member: member[1].name)
    return groups


def _stands_alone(parameter: nn.Parameter, kind: Kind, ranks: int) -> bool:
    count = parameter.numel()
    return kind.device.type == "cpu" and count % ranks == 0 and count // ranks * kind.dtype.itemsize >= ALONE


def _kind(
    parameter: nn.Parameter,
    part: Part,
    chunks: tuple[int, ...],
    options: ShardOptions,
    unit_of: Callable[[nn.Parameter], int] | None,
) -> Kind:
    dtype = options.storage if parameter.dim() >= 2 else torch.float32
    unit = unit_of(parameter) if unit_of is not None else None
    return Kind(dtype, parameter.device, chunks, unit, part.dim is not None, part.partial, part.tied_stage_rank)
