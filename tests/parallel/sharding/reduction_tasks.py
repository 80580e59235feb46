"""What ranks do in the tests of reductions: tied and partial parameters, and matrices that fill a bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dthpc.parallel.layout import Layout
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding.tasks import degrees_for, mesh_of


class Pipe(nn.Module):
    """A stage of a pipeline: a matrix that the other stage holds too, and one of its own."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared = nn.Linear(5, 5)
        torch.manual_seed(2 + stage)
        self.own = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.shared(x).tanh()).square().sum()
        return out


def tied_and_partial(
    rank: int, degrees: dict[str, int], options: dict[str, Any], axis: str
) -> tuple[dict[str, Tensor], float, float]:
    """Gradients of `shared` by pieces, where ranks on `axis` hold copies of it (whose gradients must be added) and an
    `own` each; the norm; and the norm that follows from all plain gradients."""
    mesh = mesh_of(**degrees)
    place, ranks = mesh.index(axis), mesh.layout.world_size
    model = Pipe(place)
    parts = whole_parts([model])
    for parameter, part in parts.items():
        if part.name.startswith("shared"):
            tied = {"tied_stage_rank": 1 - place} if axis == "pp" else {"partial": True}
            parts[parameter] = part.but(counts=place == 0, **tied)
        else:
            parts[parameter] = part.but(name=f"{part.name}.{place}")
    shards = Shards([model], parts, mesh, ShardOptions(**options))
    for _ in range(2):
        shards.begin_step()
        for part in range(2):
            with shards.forward(0):
                loss = model(pipe_inputs(rank, part))
            with shards.backward(0, part == 1):
                loss.backward()
        shards.finish_step()
    pieces = {f"{p.part.name}:{p.start}": p.tensor.grad.clone() for p in shards.pieces}  # type: ignore[union-attr]
    sums = pipe_reference(mesh.layout, ranks, axis)
    return pieces, shards.norm().item(), torch.stack([g.norm() for g in sums.values()]).norm().item()


def pipe_inputs(rank: int, part: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + part))


def pipe_reference(layout: Layout, ranks: int, axis: str) -> dict[str, Tensor]:
    """Sums of the gradients over all ranks that hold a parameter, by plain autograd."""
    sums: dict[str, Tensor] = {}
    for rank in range(ranks):
        place = layout.index(rank, axis)
        model = Pipe(place)
        for part in range(2):
            model(pipe_inputs(rank, part)).backward()
        for name, parameter in model.named_parameters():
            key = name if name.startswith("shared") else f"{name}.{place}"
            assert parameter.grad is not None
            sums[key] = sums.get(key, torch.zeros(())) + parameter.grad
    return sums


def broad_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 2000 * 24, bias=False) for _ in range(3)))


def broad_loss(model: nn.Module, rank: int) -> Tensor:
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(rank))
    for layer in model.children():
        x = layer(x).view(2, 2000, 24).sum(1).tanh()
    return x.sum()


def broad_gradients(rank: int) -> list[Tensor]:
    """Gradients of one rank's loss, by plain autograd."""
    model = broad_model()
    return list(torch.autograd.grad(broad_loss(model, rank), list(model.parameters())))


def broad(rank: int, size: int, zero: int) -> list[tuple[int, int, Tensor]]:
    """Gradients of pieces of matrices so large that ZeRO 2 gives each a bucket, after two passes: number, start,
    values."""
    model = broad_model()
    parts = whole_parts([model])
    options = ShardOptions(zero=zero)
    shards = Shards([model], parts, mesh_of(**degrees_for(size, {"zero": zero})), options)
    assert zero < 2 or [len(bucket.slots) for bucket in shards.buckets] == [1, 1, 1]
    for _ in range(2):
        shards.begin_step()
        with shards.forward(0):
            loss = broad_loss(model, rank)
        with shards.backward(0, True):
            loss.backward()  # type: ignore[no-untyped-call]
        shards.finish_step()
    return [
        (int(piece.part.name[0]), piece.start, piece.tensor.grad.flatten().clone())  # type: ignore[union-attr]
        for piece in shards.pieces
    ]
