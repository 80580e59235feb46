"""Check a saved state against the live one, strictly, and fill the live one in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.state import (
    OptimizerGroup,
    TrainingState,
    describe,
    is_sharded,
    model_tensors,
    optimizer_groups,
)
from dthpc.errors import UserError, UserErrors, raise_together

_SHOWN = 5


def expectation(state: TrainingState) -> dict[str, Any]:
    """What a checkpoint must hold for this rank's part of the state, as JSON values."""
    return {
        "model": {key: [list(record.shape), record.dtype] for key, record in describe(model_tensors(state)).items()},
        "optimizer": {name: group.kind for group in optimizer_groups(state) for name in group.parameters},
        "scalars": sorted(state.scalars),
        "stateful": sorted(state.stateful),
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
        tensors: the tensors of the checkpoint, by key.
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


def optimizer_targets(state: TrainingState, tensors: Mapping[str, TensorRecord]) -> dict[str, torch.Tensor]:
    """Tensors to load the saved optimizer state of this rank's parameters into, by key.

    What the optimizer already keeps in the right shape and type is filled in place; the rest is allocated here and
    given to it by `fill_optimizer`. So an optimizer that shards its state itself makes that state before a restore.
    """
    groups = {name: group for group in optimizer_groups(state) for name in group.parameters}
    targets = {}
    for key, record in tensors.items():
        if not key.startswith("optim."):
            continue
        name, _, entry = key.removeprefix("optim.").rpartition(".")
        if name in groups:
            targets[key] = _target(groups[name], name, entry, record)
    return targets


def _target(group: OptimizerGroup, name: str, entry: str, record: TensorRecord) -> torch.Tensor:
    parameter = group.parameters[name]
    live = group.optimizer.state.get(parameter, {}).get(entry)
    if isinstance(live, torch.Tensor) and describe({"": live}) == {"": record}:
        return live.detach()
    dtype = getattr(torch, record.dtype.removeprefix("torch."))
    if entry == "step":
        # torch keeps the step on the CPU unless the whole update runs on the device.
        on_device = group.options.get("capturable") or group.options.get("fused")
        return torch.empty(record.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if record.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if is_sharded(parameter) and record.shape:
        raise UserError(
            f"{entry} of {name} has the shape {record.shape}, the parameter {tuple(parameter.shape)}: "
            "how it is sharded cannot be told",
            key="optimizer",
            value=group.kind,
            instead="let the optimizer make its state before the restore",
        )
    return torch.empty(record.shape, dtype=dtype, device=parameter.device)


def fill_optimizer(state: TrainingState, targets: Mapping[str, torch.Tensor], records: list[dict[str, Any]]) -> None:
    """Give the optimizers their loaded tensors, their other state and their options."""
    by_name = {name: record for record in records for name in record["params"]}
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in targets.items():
        name, _, entry = key.removeprefix("optim.").rpartition(".")
        entries.setdefault(name, {})[entry] = tensor
    for group in optimizer_groups(state):
        for name, parameter in group.parameters.items():
            kept = {**entries.get(name, {}), **by_name[name]["state"].get(name, {})}
            group.optimizer.state.pop(parameter, None)
            if kept:
                group.optimizer.state[parameter] = kept
        if group.parameters:
            _set_options(group.options, by_name[next(iter(group.parameters))]["options"])


def check_groups(state: TrainingState, records: list[dict[str, Any]]) -> None:
    """Refuse parameter groups that mix parameters which were saved with different options."""
    by_name = {name: record["options"] for record in records for name in record["params"]}
    errors = []
    for number, group in enumerate(optimizer_groups(state)):
        options = [by_name[name] for name in group.parameters]
        odd = [name for name, each in zip(group.parameters, options, strict=True) if each != options[0]]
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
    for name, each in state.stateful.items():
        each.load_state_dict(records["stateful"][name])
