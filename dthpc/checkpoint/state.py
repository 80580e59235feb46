"""What a checkpoint holds: the state of a training job under names that do not depend on the layout.

    model.<name>             parameters and persistent buffers, by fully qualified global name
    optim.<name>.<entry>     tensors that an optimizer keeps for the parameter of that name, such as `exp_avg`
    rng.<rank>               the random number generators of one rank

Everything that is no tensor (samples, schedule, optimizer options) is JSON, which people can read.
The optimizer is read and filled directly: torch's `get_optimizer_state_dict` runs a dummy step before the first one,
and `Optimizer.load_state_dict` casts fp32 state to the type of a bf16 parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dthpc.checkpoint.manifest import TensorRecord
from dthpc.errors import UserError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
# How an update is computed, not what it computes: a job may change these between attempts.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class Stateful(Protocol):
    """A schedule, a gradient scaler: anything whose state is a dict of JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class TrainingState:
    """The live objects of a job that are saved, and that a restore fills in place."""

    model: nn.Module | Sequence[nn.Module]
    """The model, or the chunks of it that this rank holds; wrapped by DDP, sharded by FSDP2, or plain."""
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    """The optimizer or optimizers; each of their parameters belongs to the model."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """JSON values, the same on all ranks, such as the samples consumed; a restore updates this dict."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    """Further objects with a state, by name; the same on all ranks."""
    rng: bool = True
    """Whether the random number generators of each rank belong to the state."""

    def modules(self) -> list[nn.Module]:
        """The chunks of the model, without DDP around them."""
        chunks = [self.model] if isinstance(self.model, nn.Module) else list(self.model)
        return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        one = isinstance(self.optimizer, torch.optim.Optimizer)
        return [self.optimizer] if one else list(self.optimizer)  # type: ignore[arg-type, list-item]


def named_parameters(state: TrainingState) -> dict[str, nn.Parameter]:
    """The parameters by global name; a parameter with two names (tied embeddings) goes by the first."""
    return _unique((name, value) for module in state.modules() for name, value in module.named_parameters())


def named_buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    """The persistent buffers by global name."""
    return _unique(item for module in state.modules() for item in _persistent_buffers(module))


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"module {prefix or 'itself'} has an extra state, which a checkpoint does not hold",
                key="model",
                value=type(module).__name__,
                instead="keep that state in a registered buffer",
            )
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _unique(items: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in items:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if name in named:
            raise UserError("two chunks of the model use this name", key="model", value=name, instead="global names")
        named[name] = value
    return named


def model_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Parameters and buffers by key, sharing memory with the model."""
    tensors = {f"model.{name}": value.detach() for name, value in named_parameters(state).items()}
    tensors.update((f"model.{name}", value.detach()) for name, value in named_buffers(state).items())
    return tensors


def optimizer_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """The tensors that the optimizers keep, by key, sharing memory with them; none before the first step."""
    tensors = {}
    for group in optimizer_groups(state):
        for name, parameter in group.parameters.items():
            for entry, value in group.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[optimizer_key(name, entry)] = value.detach()
    return tensors


def optimizer_key(name: str, entry: str) -> str:
    """The key of what an optimizer keeps for a parameter; the last dot parts the two names."""
    if "." in str(entry):
        raise UserError("optimizer state must have no dots in its names", key="optimizer", value=entry)
    return f"optim.{name}.{entry}"


@dataclass(frozen=True)
class OptimizerGroup:
    """One parameter group of a live optimizer, its parameters named."""

    optimizer: torch.optim.Optimizer
    """The optimizer that holds it."""
    options: dict[str, Any]
    """The live dict of the group: learning rate, betas, …, `params`."""
    parameters: dict[str, nn.Parameter]
    """Its parameters by global name, in their order."""

    @property
    def kind(self) -> str:
        """The name of the optimizer's class."""
        return type(self.optimizer).__name__


def optimizer_groups(state: TrainingState) -> list[OptimizerGroup]:
    """The parameter groups of all optimizers; raises `UserError` for a parameter the model does not have."""
    names = {id(parameter): name for name, parameter in named_parameters(state).items()}
    groups = []
    for optimizer in state.optimizers():
        for number, options in enumerate(optimizer.param_groups):
            named = {names.get(id(parameter), ""): parameter for parameter in options["params"]}
            if "" in named:
                raise UserError(
                    f"group {number} holds a parameter that is not in the model and so has no name",
                    key="optimizer",
                    value=type(optimizer).__name__,
                    instead="make the optimizer from the model's parameters, after wrapping and sharding it",
                )
            groups.append(OptimizerGroup(optimizer, options, named))
    return groups


def group_records(state: TrainingState) -> list[dict[str, Any]]:
    """The optimizer groups as JSON values: class, parameter names, options, and state that is no tensor."""
    records = []
    for group in optimizer_groups(state):
        options = {key: _plain(value) for key, value in group.options.items() if key not in _IMPLEMENTATION}
        entries = {}
        for name, parameter in group.parameters.items():
            kept = group.optimizer.state.get(parameter, {})
            plain = {key: value for key, value in kept.items() if not isinstance(value, torch.Tensor)}
            if plain:
                entries[name] = plain
        names = list(group.parameters)
        records.append({"class": group.kind, "params": names, "options": options, "state": entries})
    jsonable: list[dict[str, Any]] = as_json(records, "optimizer")
    return jsonable


def scalar_records(state: TrainingState) -> dict[str, Any]:
    """Scalars and the states of further objects as JSON values."""
    stateful = {name: each.state_dict() for name, each in state.stateful.items()}
    return {
        "scalars": as_json(state.scalars, "scalars"),
        "stateful": {name: as_json(value, name) for name, value in stateful.items()},
    }


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Global shapes and types."""
    return {key: TensorRecord(tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing DTensor, which costs a start half a second."""
    return hasattr(tensor, "device_mesh")


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
