"""What a checkpoint holds: the state of a training job under names that do not depend on the layout.

    model.<name>                parameters and persistent buffers, by fully qualified global name
    optim.<name>.<entry>        tensors that an optimizer keeps for the parameter of that name, such as `exp_avg`
    outer.<kind>.<name>         what replicas that train by themselves share: `anchor`, `momentum`
    replica.<k>.model.<name>    … and what each of them has of its own, `replica.<k>.optim.<name>.<entry>` too
    rng.<rank>                  the random number generators of one rank
    extra.<rank>.<name>         other tensors of one rank, of use only in the same layout

Everything that is no tensor (samples, schedule, optimizer options) is JSON, which people can read.
The optimizer is read and filled directly: torch's `get_optimizer_state_dict` runs a dummy step before the first one,
and `Optimizer.load_state_dict` casts fp32 state to the type of a bf16 parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dthpc.checkpoint.shares import Share, whole
from dthpc.errors import UserError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Stateful(Protocol):
    """A schedule, a gradient scaler: anything whose state is a dict of JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class Replica:
    """One of several replicas whose parameters and optimizers go ways of their own between meetings."""

    index: int
    """Which one this rank belongs to."""

    count: int
    """How many there are."""

    shared: dict[str, Sequence[torch.Tensor]]
    """What is equal on all replicas, by kind: for each piece of the state a tensor cut like it. `anchor` holds the
    parameters as of the last meeting; of any other kind zeros are a state to begin from."""

    stateful: dict[str, Stateful] = field(default_factory=dict)
    """Objects with a state that differs between replicas, by name, such as a gradient scaler."""


@dataclass
class TrainingState:
    """The live objects of a job that are saved, and that a restore fills in place."""

    model: nn.Module | Sequence[nn.Module]
    """The model, or the chunks of it that this rank holds; plain or wrapped by DDP. Gives the persistent buffers."""
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    """The optimizer or optimizers; each of their parameters is the tensor of a piece."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """JSON values, the same on all ranks, such as the samples consumed; a restore updates this dict."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    """Further objects with a state, by name; the same on all ranks."""
    rng: bool = True
    """Whether the random number generators of each rank belong to the state."""
    pieces: Sequence[Share] | None = None
    """What this rank holds of the trained parameters, under their global names; `None`: each parameter of `model`,
    whole."""
    frozen: Sequence[Share] = ()
    """Parameters beside the pieces, which no optimizer updates."""
    layout: str = ""
    """The layout in words. Random numbers and `extra` come back only where it is the one that was saved; empty: where
    the number of ranks is."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of this rank alone, such as the error feedback of compressed gradients."""
    replica: Replica | None = None
    """Where replicas train by themselves: the one that this rank belongs to."""
    allocate: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None
    """Makes room for what an optimizer keeps for a piece: gets the piece's tensor and a type, and returns a tensor of
    its shape; `None`: beside the piece's tensor."""

    def modules(self) -> list[nn.Module]:
        """The chunks of the model, without DDP around them."""
        chunks = [self.model] if isinstance(self.model, nn.Module) else list(self.model)
        return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers."""
        one = isinstance(self.optimizer, torch.optim.Optimizer)
        return [self.optimizer] if one else list(self.optimizer)  # type: ignore[arg-type, list-item]

    def parameters(self) -> Sequence[Share]:
        """This rank's shares of the parameters, under their global names."""
        if self.pieces is not None:
            return self.pieces
        return [whole(name, parameter) for name, parameter in named_parameters(self).items()]


def named_parameters(state: TrainingState) -> dict[str, nn.Parameter]:
    """The parameters of the modules by global name; one with two names (tied embeddings) goes by the first."""
    named = _unique((name, value) for module in state.modules() for name, value in module.named_parameters())
    for name, parameter in named.items():
        if hasattr(parameter, "device_mesh"):
            raise UserError(
                f"the parameter {name} is a DTensor, whose cut a checkpoint does not know",
                key="model",
                value=type(parameter).__name__,
                instead="shard with dthpc.parallel, or describe the local shards as pieces (dthpc.checkpoint.shares)",
            )
    return named


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


def own_key(key: str, replica: Replica | None) -> str:
    """The key under which a replica saves what other replicas hold differently."""
    return key if replica is None else f"replica.{replica.index}.{key}"


def buffer_shares(state: TrainingState) -> list[Share]:
    """The persistent buffers under their keys, sharing memory with the model."""
    return [whole(f"model.{name}", value) for name, value in named_buffers(state).items()]


def model_shares(state: TrainingState) -> list[Share]:
    """Parameters and buffers under their keys, sharing memory with the model."""
    parameters = [*state.parameters(), *state.frozen]
    return [each.holding(f"model.{each.name}", each.tensor) for each in parameters] + buffer_shares(state)


def outer_shares(state: TrainingState) -> list[Share]:
    """What replicas share, under its keys; none where there is one model."""
    if state.replica is None:
        return []
    pieces = state.parameters()
    return [
        piece.holding(f"outer.{kind}.{piece.name}", tensor)
        for kind, tensors in state.replica.shared.items()
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
