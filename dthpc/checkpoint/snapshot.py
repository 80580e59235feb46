"""The state at a step boundary, agreed on by all ranks and ready to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dthpc.checkpoint import rng
from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.state import (
    TrainingState,
    describe,
    group_records,
    is_sharded,
    model_tensors,
    named_buffers,
    optimizer_tensors,
    scalar_records,
)
from dthpc.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """What one rank offers to write, and what all of them describe."""

    step: int
    """Optimizer updates done."""
    tensors: dict[str, torch.Tensor]
    """This rank's tensors by key; those that are not copies change with the next step."""
    described: dict[str, TensorRecord]
    """All shared tensors of all ranks."""
    records: dict[str, Any]
    """The JSON part of the state: `scalars`, `stateful`, `optimizer`; the same on every rank."""


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
    tensors, account = ranks.together(what, lambda: _local(state, step))
    parts = ranks.distinct(account)
    described, records = ranks.together(what, lambda: _merge([part for _, part in parts]))
    for name in named_buffers(state):
        # Buffers such as running means may differ between replicas; DDP goes on with the first rank's.
        key = f"model.{name}"
        owner = next(rank for rank, part in parts if key in part["tensors"])
        if owner != ranks.rank and not is_sharded(tensors[key]):
            del tensors[key]
    if state.rng:
        tensors[rng_key(ranks.rank)] = rng.capture()
    if copy:
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    return Snapshot(step, tensors, described, records)


def rng_key(rank: int) -> str:
    """The key of one rank's random number generators."""
    return f"rng.{rank:05d}"


def _local(state: TrainingState, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's tensors, and an account of its part of the state as JSON values."""
    tensors = {**model_tensors(state), **optimizer_tensors(state)}
    shapes = {key: [list(record.shape), record.dtype] for key, record in describe(tensors).items()}
    return tensors, {
        "step": step,
        "tensors": shapes,
        **scalar_records(state),
        "optimizer": group_records(state),
    }


def _merge(accounts: list[dict[str, Any]]) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """One account of the whole state from the different ones among the ranks."""
    first = accounts[0]
    shapes: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for account in accounts:
        for key in ("step", "scalars", "stateful"):
            if account[key] != first[key]:
                raise UserError("the ranks do not hold the same value", key=key, value=account[key])
        for key, shape in account["tensors"].items():
            if shapes.setdefault(key, shape) != shape:
                raise UserError("the ranks hold it in different shapes or types", key=key, value=shape)
        groups += [group for group in account["optimizer"] if group not in groups]
    _refuse_twofold(groups)
    described = {key: TensorRecord(tuple(shape), dtype) for key, (shape, dtype) in shapes.items()}
    return described, {"scalars": first["scalars"], "stateful": first["stateful"], "optimizer": groups}


def _refuse_twofold(groups: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group["params"]:
            if name in seen:
                raise UserError("the ranks differ in its optimizer options or state", key="optimizer", value=name)
            seen.add(name)
