"""A model cut as the layouts of dthpc.parallel cut one, with values that are known for every element."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dthpc.checkpoint import store
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import TrainingState
from dthpc.parallel.layout import Layout

# Name, shape, dimension that tensor parallelism splits. No size is even: parts and shards are not equal.
PARAMETERS: list[tuple[str, tuple[int, ...], int | None]] = [
    ("embed.weight", (11, 6), 0),
    ("layers.0.row", (6, 5), 1),
    ("layers.0.bias", (6,), None),
    ("layers.1.column", (5, 6), 0),
    ("layers.1.conv", (3, 2, 5), None),
    ("layers.1.scale", (), None),
    ("head.bias", (11,), 0),
]
TIED = "embed.weight"
BUFFERS = {"first_mean": 0, "last_mean": 1}
ENTRIES = ("exp_avg", "exp_avg_sq")

LAYOUTS = {
    "one": Layout(),
    "dp": Layout(replicate=2),
    "zero of 4": Layout(shard=4, zero=1),
    "zero of 5": Layout(shard=5, zero=3),
    "hsdp": Layout(replicate=2, shard=3, zero=2),
    "tp": Layout(tp=3),
    "tp with zero": Layout(tp=2, shard=3, zero=1),
    "pp": Layout(pp=3),
    "pp of chunks": Layout(pp=2, chunks=2),
    "3d": Layout(pp=2, tp=2, shard=2, zero=1),
    "hsdp with tp, inside out": Layout(
        tp=2, replicate=2, shard=2, zero=3, order=("tp", "shard", "replicate", "cp", "pp")
    ),
}


def value(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor of a key: all elements of all keys differ."""
    start = zlib.crc32(key.encode()) % 997
    return torch.arange(start, start + math.prod(shape), dtype=torch.float64).mul(math.pi).float().view(shape)


def part(share: Share, key: str) -> torch.Tensor:
    """The values of a share of the whole tensor of a key, flat."""
    whole = value(key, share.shape)
    for dim, (offset, size) in enumerate(zip(share.offsets, share.local_shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.flatten()[share.start : share.stop]


def stages_of(layout: Layout, rank: int) -> list[list[tuple[str, bool]]]:
    """The names in each chunk of a rank, and whether its copy counts: the last stage ties its head to the embedding."""
    chunks: list[list[tuple[str, bool]]] = []
    for chunk in range(layout.chunks):
        stage = chunk * layout.pp + layout.index(rank, "pp")
        names = [name for at, (name, _, _) in enumerate(PARAMETERS) if at * layout.stages // len(PARAMETERS) == stage]
        tied = stage == layout.stages - 1 and layout.pp > 1
        chunks.append([(name, True) for name in names] + [(TIED, False)] * tied)
    return chunks


def shares_of(layout: Layout, rank: int) -> list[Share]:
    """What a rank's optimizer updates: flat ranges of parts, which lie one after another in a padded bucket."""
    cuts = {name: (shape, dim) for name, shape, dim in PARAMETERS}
    pieces = []
    for chunk in stages_of(layout, rank):
        parts = []
        for name, first in chunk:
            shape, dim = cuts[name]
            offsets, local = [0] * len(shape), list(shape)
            if dim is not None:
                local[dim], offsets[dim] = split(shape[dim], layout.tp, layout.index(rank, "tp"))
            counts = first and (dim is not None or layout.index(rank, "tp") == 0)
            parts.append((name, shape, tuple(offsets), tuple(local), counts))
        size = -(-sum(math.prod(local) for _, _, _, local, _ in parts) // layout.shard)
        begin, at = size * layout.index(rank, "shard"), 0
        for name, shape, offsets, local, counts in parts:
            start, stop = max(begin - at, 0), min(begin + size - at, math.prod(local))
            at += math.prod(local)
            if start < stop:
                tensor = nn.Parameter(torch.full((stop - start,) if layout.zero else local, 99.0))
                pieces.append(Share(name, shape, offsets, local, start, stop, tensor, counts))
    return pieces


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Length and begin of a part; the first ones are one longer where they are not equal."""
    each, more = divmod(size, parts)
    return each + (index < more), index * each + min(index, more)


@dataclass
class Trained:
    """A rank's state."""

    pieces: list[Share]
    optimizer: torch.optim.Optimizer
    state: TrainingState


def build(layout: Layout, rank: int, lr: float) -> Trained:
    """A rank's state before anything was trained or restored."""
    pieces = shares_of(layout, rank)
    groups = [
        {"params": [piece.tensor for piece in pieces if len(piece.shape) > 1], "weight_decay": 0.1},
        {"params": [piece.tensor for piece in pieces if len(piece.shape) <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    chunks = [nn.Module() for _ in range(layout.chunks)]
    for number, chunk in enumerate(chunks):
        stage = number * layout.pp + layout.index(rank, "pp")
        for name, owner in BUFFERS.items():
            if stage == owner * (layout.stages - 1):
                chunk.register_buffer(name, torch.full((3,), 99.0))
    state = TrainingState(chunks, optimizer, {"samples": 0}, rng=False, pieces=pieces, layout=layout.describe())
    return Trained(pieces, optimizer, state)


def save(rank: int, root: Path, layout: Layout) -> list[int]:
    """Save the known values; how many elements this rank holds of each parameter."""
    job = build(layout, rank, lr=0.25)
    for piece in job.pieces:
        piece.tensor.detach().view(-1).copy_(part(piece, f"model.{piece.name}"))
        kept: dict[str, Any] = {entry: part(piece, f"optim.{piece.name}.{entry}") for entry in ENTRIES}
        shaped = {entry: tensor.view(piece.tensor.shape) for entry, tensor in kept.items()}
        job.optimizer.state[piece.tensor] = {"step": torch.tensor(3.0), **shaped}
    for chunk in job.state.modules():
        for name, buffer in chunk.named_buffers():
            buffer.copy_(value(name, (3,)))
    job.state.scalars["samples"] = 77
    store.save(root, 3, job.state, attempt=0)
    return [piece.numel for piece in job.pieces]


def restore_each(rank: int, roots: dict[str, Path], layout: Layout) -> dict[str, list[str]]:
    """Restore several checkpoints in turn, each into a fresh state; for each what is not as it was saved."""
    return {name: restore(rank, root, layout) for name, root in roots.items()}


def restore(rank: int, root: Path, layout: Layout) -> list[str]:
    """Restore into a state of other values; what is not as it was saved."""
    job = build(layout, rank, lr=0.5)
    info = store.restore(root, job.state)
    assert info is not None
    wrong = []
    for piece in job.pieces:
        kept = job.optimizer.state[piece.tensor]
        found = {f"model.{piece.name}": piece.tensor.detach()}
        found |= {f"optim.{piece.name}.{entry}": kept[entry] for entry in ENTRIES}
        for key, tensor in found.items():
            if tensor.shape != piece.tensor.shape or not torch.equal(tensor.view(-1), part(piece, key)):
                wrong.append(key)
        if kept["step"].shape != () or kept["step"] != 3:
            wrong.append(f"optim.{piece.name}.step")
    for chunk in job.state.modules():
        wrong += [name for name, buffer in chunk.named_buffers() if not torch.equal(buffer, value(name, (3,)))]
    wrong += [f"lr of group {n}" for n, g in enumerate(job.optimizer.param_groups) if g["params"] and g["lr"] != 0.25]
    wrong += ["samples"] if job.state.scalars != {"samples": 77} else []
    return wrong
