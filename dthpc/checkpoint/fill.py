"""Check a saved state against the live one, strictly, and fill the live one in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.optimizers import OptimizerGroup, not_elementwise, optimizer_groups, optimizer_key
from dthpc.checkpoint.shares import Share, whole
from dthpc.checkpoint.state import Stateful, TrainingState, model_shares
from dthpc.errors import UserError, UserErrors, raise_together

_SHOWN = 5


def expectation(state: TrainingState) -> dict[str, Any]:
    """What a checkpoint must hold for this rank's part of the state, as JSON values."""
    return {
        "model": {share.name: [list(share.shape), share.record.dtype] for share in model_shares(state)},
        "optimizer": {piece.name: group.kind for group in optimizer_groups(state) for piece in group.pieces},
        "scalars": sorted(state.scalars),
        "stateful": sorted({**state.stateful, **_own(state)}),
        "extra": sorted(state.extra),
    }


def check_meta(path: str, expected: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise one `UserError` for every expected entry of the manifest's `meta` that differs."""
    raise_together(
        UserError(
            f"the checkpoint {path} was written with {saved.get(key)!r}",
            key=key,
            value=repr(value),
            instead=f"go on with {key}={saved.get(key)!r}, or start another run",
        )
        for key, value in expected.items()
        if saved.get(key) != value
    )


def check_match(
    path: str,
    expected: list[dict[str, Any]],
    tensors: Mapping[str, TensorRecord],
    records: Mapping[str, Any],
) -> None:
    """Refuse the checkpoint of another model, optimizer or job.

    Args:
        path: the checkpoint, for the message.
        expected: the different expectations among the ranks; together they are the whole state.
        tensors: the tensors of the checkpoint that are for this rank's replica, by the keys of the state.
        records: its JSON part: `scalars`, `stateful`, `optimizer`.

    Raises:
        UserError: keys are missing or unexpected, or a shape, a type or an optimizer's class differs.
    """
    model = {key: value for part in expected for key, value in part["model"].items()}
    saved = {key: [list(each.shape), each.dtype] for key, each in tensors.items() if key.startswith("model.")}
    problems = _key_problems("tensors", model.keys(), saved.keys())
    for key in sorted(model.keys() & saved.keys()):
        if model[key] != saved[key]:
            problems.append(f"{key} is {_text(saved[key])} there and {_text(model[key])} here")
    optimizer = {name: kind for part in expected for name, kind in part["optimizer"].items()}
    classes = {name: record["class"] for record in records["optimizer"] for name in record["params"]}
    problems += _key_problems("optimizer state of", optimizer.keys(), classes.keys())
    for kind, was in sorted({(optimizer[name], classes[name]) for name in optimizer.keys() & classes.keys()}):
        if kind != was:
            problems.append(f"the optimizer is {was} there and {kind} here")
    for kind in ("scalars", "stateful"):
        live = {key for part in expected for key in part[kind]}
        problems += _key_problems(kind, live, records[kind].keys())
    if problems:
        shown = problems[:_SHOWN] + ([f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        raise UserError(
            f"this is a checkpoint of another model or optimizer: {'; '.join(shown)}",
            key="checkpoint",
            value=path,
            instead="go on with the config that it was written with, or start another run (run.name)",
        )


def _key_problems(what: str, live: Collection[str], saved: Collection[str]) -> list[str]:
    missing, unexpected = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    problems = [f"it lacks the {what} {_names(missing)}"] if missing else []
    return problems + ([f"it holds the {what} {_names(unexpected)}, unknown here"] if unexpected else [])


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _text(record: list[Any]) -> str:
    shape, dtype = record
    return f"{dtype} {tuple(shape)}"


@dataclass(frozen=True)
class OptimizerTarget:
    """Room for one saved tensor of an optimizer's state."""

    piece: Share
    """The parameter."""
    entry: str
    """Its name in the optimizer's state."""
    share: Share
    """The room, under the key that the state has for it."""


def optimizer_targets(state: TrainingState, tensors: Mapping[str, TensorRecord]) -> list[OptimizerTarget]:
    """Room to load the saved optimizer state of this rank's pieces into, cut like them.

    What the optimizer already keeps in the right shape and type is filled in place; the rest is allocated here and
    given to it by `fill_optimizer`.
    """
    entries: dict[str, dict[str, TensorRecord]] = {}
    for key, record in tensors.items():
        if key.startswith("optim."):
            name, _, entry = key.removeprefix("optim.").rpartition(".")
            entries.setdefault(name, {})[entry] = record
    return [
        OptimizerTarget(piece, entry, _room(state, group, piece, entry, record))
        for group in optimizer_groups(state)
        for piece in group.pieces
        for entry, record in entries.get(piece.name, {}).items()
    ]


def _room(state: TrainingState, group: OptimizerGroup, piece: Share, entry: str, record: TensorRecord) -> Share:
    key = optimizer_key(piece.name, entry)
    dtype = getattr(torch, record.dtype.removeprefix("torch."))
    live = group.kept(piece).get(entry)
    if not isinstance(live, torch.Tensor) or live.dtype != dtype:
        live = None
    # torch keeps a step of no dimension for a parameter of any.
    if record.shape == piece.shape and not (entry == "step" and record.shape == ()):
        if live is not None and live.numel() == piece.numel:
            return piece.holding(key, live)
        allocate = state.allocate or _beside
        return piece.holding(key, allocate(piece.tensor.detach(), dtype))
    if record.shape and not piece.is_whole:
        raise not_elementwise(piece, entry, record.shape, group.kind)
    if live is not None and tuple(live.shape) == record.shape:
        return whole(key, live)
    # torch keeps the step on the CPU unless the whole update runs on the device.
    on_device = entry != "step" or group.options.get("capturable") or group.options.get("fused")
    return whole(key, torch.empty(record.shape, dtype=dtype, device=piece.tensor.device if on_device else "cpu"))


def _beside(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(piece, dtype=dtype)


def fill_optimizer(state: TrainingState, targets: Sequence[OptimizerTarget], records: list[dict[str, Any]]) -> None:
    """Give the optimizers their loaded tensors, their other state and their options."""
    by_name = {name: record for record in records for name in record["params"]}
    loaded: dict[int, dict[str, Any]] = {}
    for target in targets:
        loaded.setdefault(id(target.piece.tensor), {})[target.entry] = target.share.tensor.detach()
    for group in optimizer_groups(state):
        for piece in group.pieces:
            kept = {**loaded.get(id(piece.tensor), {}), **by_name[piece.name]["state"].get(piece.name, {})}
            group.optimizer.state.pop(piece.tensor, None)
            if kept:
                group.optimizer.state[piece.tensor] = kept
        if group.pieces:
            _set_options(group.options, by_name[group.pieces[0].name]["options"])


def check_groups(state: TrainingState, records: list[dict[str, Any]]) -> None:
    """Refuse parameter groups that mix parameters which were saved with different options."""
    by_name = {name: record["options"] for record in records for name in record["params"]}
    errors = []
    for number, group in enumerate(optimizer_groups(state)):
        names = [piece.name for piece in group.pieces]
        odd = [name for name in names if by_name[name] != by_name[names[0]]]
        if odd:
            errors.append(
                UserError(
                    f"group {number} mixes parameters saved with different options: {_names(odd)}",
                    key="optimizer",
                    value=group.kind,
                    instead="group the parameters as before",
                )
            )
    if errors:
        raise UserErrors(errors)


def _set_options(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        current = live.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            live[key] = tuple(value) if isinstance(current, tuple) else value


def fill_scalars(state: TrainingState, records: Mapping[str, Any]) -> None:
    """Set scalars and further objects to their saved states."""
    state.scalars.update(records["scalars"])
    for name, each in {**state.stateful, **_own(state)}.items():
        each.load_state_dict(records["stateful"][name])


def _own(state: TrainingState) -> dict[str, Stateful]:
    return {} if state.replica is None else state.replica.stateful
