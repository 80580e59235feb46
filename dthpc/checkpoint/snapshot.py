"""The state at a step boundary, agreed on by all ranks and ready to be written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dthpc.checkpoint import rng
from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.optimizers import group_records, merge_group_records, scalar_records
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.replicas import state_shares
from dthpc.checkpoint.shares import Share, whole
from dthpc.checkpoint.state import TrainingState, buffer_shares, own_key
from dthpc.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """What one rank offers to write, and what all of them describe."""

    step: int
    """Optimizer updates done."""
    shares: list[Share]
    """This rank's shares by key; those whose tensors are not copies change with the next step."""
    described: dict[str, TensorRecord]
    """All tensors that ranks share."""
    records: dict[str, Any]
    """The JSON part of the state: `scalars`, `stateful`, `optimizer`, `layout`, `replicas`, and the names of `extra`;
    the same on every rank."""


def snapshot(state: TrainingState, step: int, ranks: Ranks, *, copy: bool = False) -> Snapshot:
    """Take the state of all ranks at a step boundary; collective, changes nothing and draws no random number.

    Args:
        state: the live objects.
        step: optimizer updates done.
        ranks: those that save together.
        copy: copy the tensors on their devices, so that training may go on before they are written.

    Raises:
        UserError: the state cannot be saved, or the ranks do not agree on what it is.
    """
    what = f"taking the state of step {step}"
    shares, account = ranks.together(what, lambda: _local(state, step))
    parts = ranks.distinct(account)
    described, records = ranks.together(what, lambda: _merge([part for _, part in parts]))
    # Buffers such as running means may differ between copies; training goes on with the first rank's.
    owners = {key: rank for rank, part in reversed(parts) for key in part["tensors"]}
    buffers = {own_key(share.name, state.replica) for share in buffer_shares(state)}
    shares = [share for share in shares if share.name not in buffers or owners[share.name] == ranks.rank]
    shares += [whole(extra_key(ranks.rank, name), tensor) for name, tensor in state.extra.items()]
    if state.rng:
        shares.append(whole(rng_key(ranks.rank), rng.capture()))
    if copy:
        shares = [replace(share, tensor=share.tensor.detach().clone()) for share in shares]
    return Snapshot(step, shares, described, records)


def rng_key(rank: int) -> str:
    """The key of one rank's random number generators."""
    return f"rng.{rank:05d}"


def extra_key(rank: int, name: str) -> str:
    """The key of a tensor that belongs to one rank."""
    return f"extra.{rank:05d}.{name}"


def _local(state: TrainingState, step: int) -> tuple[list[Share], dict[str, Any]]:
    """This rank's shares, and an account of its part of the state as JSON values."""
    shares = state_shares(state)
    return shares, {
        "step": step,
        "layout": state.layout,
        "replicas": 0 if state.replica is None else state.replica.count,
        "tensors": {share.name: [list(share.shape), share.record.dtype] for share in shares},
        **scalar_records(state),
        "optimizer": group_records(state),
        "extra": sorted(state.extra),
    }


def _merge(accounts: list[dict[str, Any]]) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """One account of the whole state from the different ones among the ranks."""
    first = accounts[0]
    shapes: dict[str, Any] = {}
    stateful: dict[str, Any] = {}
    same = ("scalars", "layout", "replicas")
    for account in accounts:
        for key in ("step", *same):
            if account[key] != first[key]:
                raise UserError("the ranks do not hold the same value", key=key, value=account[key])
        for key, value in account["stateful"].items():
            if stateful.setdefault(key, value) != value:
                raise UserError("the ranks do not hold the same state of it", key=f"stateful.{key}", value=value)
        for key, shape in account["tensors"].items():
            if shapes.setdefault(key, shape) != shape:
                raise UserError(f"the ranks hold {key} in different shapes or types", key="model", value=shape)
    described = {key: TensorRecord(tuple(shape), dtype) for key, (shape, dtype) in shapes.items()}
    return described, {
        **{key: first[key] for key in same},
        "stateful": stateful,
        "optimizer": merge_group_records([account["optimizer"] for account in accounts]),
        "extra": sorted({name for account in accounts for name in account["extra"]}),
    }
