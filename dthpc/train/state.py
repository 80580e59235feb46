"""How far training has come, and how that and the live objects map to what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import Replica, Stateful, TrainingState
from dthpc.errors import UserError
from dthpc.parallel.check import AXES
from dthpc.parallel.parts import whole_parts

if TYPE_CHECKING:
    from dthpc.parallel.layout import Layout
    from dthpc.parallel.model import ParallelModel
    from dthpc.parallel.offload import Offload
    from dthpc.parallel.parts import Part, Parts, Piece


@dataclass
class TrainState:
    """Two numbers from which a run goes on; everything else is weights and optimizer state."""

    step: int = 0
    """Optimizer updates made."""

    samples: int = 0
    """Samples used: the sampler's whole state."""

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """From what `state_dict` gave."""
        self.step, self.samples = state_dict["step"], state_dict["samples"]


def checkpoint_state(
    model: nn.Module | ParallelModel,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    scaler: Stateful | None = None,
    outer: Replica | None = None,
    *,
    extra: dict[str, torch.Tensor] | None = None,
    offload: Offload | None = None,
) -> TrainingState:
    """The live objects that a checkpoint is made of, and that a restore fills in place.

    After a restore the pieces hold the saved values; `shards.publish()` then gives them to the parameters.

    Args:
        model: on its mesh; or a plain module, each parameter of which is a piece.
        optimizer: made from the tensors of the model's pieces.
        state: how far training has come.
        scaler: the loss scale of fp16, if its history belongs to the state.
        outer: with asynchronous data parallelism, the replica of this rank and what all replicas share.
        extra: tensors of this rank alone, such as the error feedback of compressed gradients.
        offload: places what the optimizer keeps.
    """
    stateful: dict[str, Stateful] = {"train": state}
    if scaler is not None and outer is not None:
        # Replicas that train by themselves overflow by themselves.
        outer = replace(outer, stateful={**outer.stateful, "scaler": scaler})
    elif scaler is not None:
        stateful["scaler"] = scaler
    if isinstance(model, nn.Module):
        return TrainingState(model, optimizer, stateful=stateful, replica=outer, extra=extra or {})
    return TrainingState(
        model.chunks,
        optimizer,
        stateful=stateful,
        pieces=shares_of(model.shards.pieces),
        frozen=_frozen(model),
        layout=_layout_words(model.mesh.layout),
        extra=extra or {},
        replica=outer,
        allocate=_allocator(offload),
    )


def live_state(model: ParallelModel, optimizer: torch.optim.Optimizer, state: TrainState) -> TrainingState:
    """All of a training that a checkpoint holds; collective where replicas have an exchange under way."""
    scaler = model.scaler if model.scaler.dynamic else None
    extra, replica = model.shards.extra_state(), None
    if model.outer is not None:
        model.outer.settle()
        outer = model.outer.replica_state
        replica = Replica(outer.index, outer.count, dict(outer.shared))
        extra = {**extra, **outer.extra}
    return checkpoint_state(model, optimizer, state, scaler, replica, extra=extra, offload=model.offload)


def take_over(model: ParallelModel, restored: TrainingState) -> None:
    """Go on from a state that a restore has filled; collective."""
    model.shards.load_extra_state(restored.extra)
    model.shards.publish()


def shares_of(pieces: Iterable[Piece]) -> list[Share]:
    """Pieces as a checkpoint knows them."""
    return [share_of(piece.part, piece.tensor, piece.start, piece.stop) for piece in pieces]


def share_of(part: Part, tensor: torch.Tensor, start: int, stop: int) -> Share:
    """The flat range [start, stop) of a part, with its values."""
    return Share(part.name, part.shape, part.offsets, part.local_shape, start, stop, tensor, part.counts)


def _frozen(model: ParallelModel) -> list[Share]:
    """Parameters that are not trained: no pieces, but part of the model."""
    parameters = [p for chunk in model.chunks for p in chunk.parameters() if not p.requires_grad]
    if not parameters:
        return []
    parts: Parts | None = getattr(model, "parts", None)
    if parts is None and model.mesh.size("tp") > 1:
        raise UserError("what each rank holds of frozen parameters is not known", key="parallel.tp", instead="tp=1")
    known = whole_parts(model.chunks) if parts is None else parts
    return [share_of(known[each], each, 0, each.numel()) for each in dict.fromkeys(parameters)]


def _layout_words(layout: Layout) -> str:
    """Two layouts of the same words put the same part of the model on each rank."""
    return layout.describe() + ("" if layout.order == AXES else f" order={','.join(layout.order)}")


def _allocator(offload: Offload | None) -> Any:
    if offload is None or not offload.moves("optimizer"):
        return None

    def allocate(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return offload.place(torch.empty(piece.shape, dtype=dtype), "optimizer")

    return allocate
