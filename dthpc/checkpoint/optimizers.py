"""What live optimizers hold, under the names of the parameters that they update."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from dthpc.checkpoint.shares import Share, whole
from dthpc.checkpoint.state import TrainingState, own_key
from dthpc.errors import UserError

# How an update is computed, not what it computes: a job may change these between attempts.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class OptimizerGroup:
    """One parameter group of a live optimizer, its parameters known as pieces."""

    optimizer: torch.optim.Optimizer
    """The optimizer that holds it."""
    options: dict[str, Any]
    """The live dict of the group: learning rate, betas, …, `params`."""
    pieces: list[Share]
    """Its parameters, in their order; their tensors are the keys of the optimizer's state."""

    @property
    def kind(self) -> str:
        """The name of the optimizer's class."""
        return type(self.optimizer).__name__

    def kept(self, piece: Share) -> dict[str, Any]:
        """What the optimizer keeps for one of the parameters; empty before the first step."""
        kept: dict[str, Any] = self.optimizer.state.get(piece.tensor, {})
        return kept


def optimizer_groups(state: TrainingState) -> list[OptimizerGroup]:
    """The parameter groups of all optimizers; raises `UserError` for a parameter that is no piece of the state."""
    pieces = {id(piece.tensor): piece for piece in state.parameters()}
    groups = []
    for optimizer in state.optimizers():
        for number, options in enumerate(optimizer.param_groups):
            known = [pieces[id(parameter)] for parameter in options["params"] if id(parameter) in pieces]
            if len(known) < len(options["params"]):
                raise UserError(
                    f"group {number} holds a parameter that is not in the model and so has no name",
                    key="optimizer",
                    value=type(optimizer).__name__,
                    instead="make the optimizer from the model's parameters, after wrapping and sharding it",
                )
            groups.append(OptimizerGroup(optimizer, options, known))
    return groups


def optimizer_shares(state: TrainingState) -> list[Share]:
    """The tensors that the optimizers keep, under their keys, sharing memory; none before the first step."""
    return [
        _entry(piece, entry, value.detach(), group.kind)
        for group in optimizer_groups(state)
        for piece in group.pieces
        for entry, value in group.kept(piece).items()
        if isinstance(value, torch.Tensor)
    ]


def optimizer_key(name: str, entry: str) -> str:
    """The key of what an optimizer keeps for a parameter; the last dot parts the two names."""
    if "." in str(entry):
        raise UserError("optimizer state must have no dots in its names", key="optimizer", value=entry)
    return f"optim.{name}.{entry}"


def _entry(piece: Share, entry: str, value: torch.Tensor, kind: str) -> Share:
    """What an optimizer keeps for a piece: cut like it if it has a value for each element, else whole."""
    key = optimizer_key(piece.name, entry)
    if value.ndim and value.numel() == piece.numel:
        return piece.holding(key, value)
    if value.ndim and not piece.is_whole:
        raise not_elementwise(piece, entry, tuple(value.shape), kind)
    return whole(key, value, piece.counts)


def not_elementwise(piece: Share, entry: str, shape: tuple[int, ...], kind: str) -> UserError:
    """The error for optimizer state that cannot be cut like its parameter."""
    return UserError(
        f"it keeps {entry} of shape {shape} for {piece.numel} elements of {piece.name}, which is "
        f"{piece.shape}: state that is not one value an element cannot be cut over ranks",
        key="optimizer",
        value=kind,
        instead="an optimizer that works element by element, or parallel.zero=0 and parallel.tp=1",
    )


def group_records(state: TrainingState) -> list[dict[str, Any]]:
    """The optimizer groups as JSON values: class, parameter names, options, and state that is no tensor."""
    records = []
    for group in optimizer_groups(state):
        options = {key: _plain(value) for key, value in group.options.items() if key not in _IMPLEMENTATION}
        entries = {}
        for piece in group.pieces:
            plain = {key: value for key, value in group.kept(piece).items() if not isinstance(value, torch.Tensor)}
            if plain:
                entries[piece.name] = plain
        names = [piece.name for piece in group.pieces]
        records.append({"class": group.kind, "params": names, "options": options, "state": entries})
    jsonable: list[dict[str, Any]] = as_json(records, "optimizer")
    return jsonable


def merge_group_records(accounts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of all ranks as one list, each name once: ranks hold different parameters of a group.

    Raises:
        UserError: ranks differ in the options or in the state of a parameter.
    """
    merged: dict[str, dict[str, Any]] = {}
    owner: dict[str, tuple[str, Any]] = {}
    for record in (record for account in accounts for record in account):
        kind = json.dumps([record["class"], record["options"]], sort_keys=True)
        group = merged.setdefault(kind, {**record, "params": [], "state": {}})
        for name in record["params"]:
            held = kind, record["state"].get(name)
            if owner.setdefault(name, held) != held:
                raise UserError("the ranks differ in its optimizer options or state", key="optimizer", value=name)
            group["params"].append(name)
        group["state"].update(record["state"])
    for group in merged.values():
        group["params"] = list(dict.fromkeys(group["params"]))
    return list(merged.values())


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def as_json(value: Any, key: str) -> Any:
    """A value as it comes back from JSON (tuples become lists); raises `UserError` under `key` where it cannot."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"its state cannot be saved as JSON ({error})",
            key=key,
            instead="numbers, strings, lists and dicts; tensors belong to the model or its optimizer",
        ) from error


def scalar_records(state: TrainingState) -> dict[str, Any]:
    """Scalars and the states of further objects as JSON values."""
    stateful = {name: each.state_dict() for name, each in state.stateful.items()}
    if state.replica is not None:
        own = state.replica.stateful.items()
        stateful.update({own_key(name, state.replica): each.state_dict() for name, each in own})
    return {
        "scalars": as_json(state.scalars, "scalars"),
        "stateful": {name: as_json(value, name) for name, value in stateful.items()},
    }
