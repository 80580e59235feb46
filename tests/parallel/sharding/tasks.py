"""What ranks do in the tests of sharding."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh, make_mesh
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from dthpc.parallel.sharding.bucket import Kind
from dthpc.parallel.sharding.shared import SharedStorage

WORDS, WIDTH = 11, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Net(nn.Module):
    """Blocks in a list, an embedding that is the output layer too, and odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def mesh_of(shared: bool = False, **degrees: int) -> Mesh:
    """A mesh, whose ranks share memory if `shared`."""
    return make_mesh(Layout(**degrees), "cpu", shared_memory=shared)


def tokens_of(step: int, share: int, micro: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * share + micro)
    return torch.randint(0, WORDS, (rows, 5), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    stored = next(p.dtype for p in model.parameters() if p.dim() >= 2)
    with torch.autocast("cpu", dtype=stored, enabled=stored != torch.float32):
        logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, -1).flatten(), reduction="sum")


Rows = list[list[int]]
"""Rows of each micro-batch of each data-parallel rank; the same in each step."""


def adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=0.02, weight_decay=0.1, fused=True)


def reference(rows: Rows, steps: int, clip: float = 1.0) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after some steps of a single process, by plain autograd, and the norm of each step's gradient."""
    model = Net()
    optimizer = adamw(list(model.parameters()))
    norms = []
    total = sum(map(sum, rows)) * 5
    for step in range(steps):
        optimizer.zero_grad()
        for share, micros in enumerate(rows):
            for micro, count in enumerate(micros):
                (loss_of(model, tokens_of(step, share, micro, count)) / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(
    rank: int, degrees: dict[str, int], options: dict[str, Any], rows: Rows, steps: int, clip: float = 1.0
) -> tuple[list[tuple[str, int, int, Tensor]], list[float], dict[str, Tensor], list[dict[str, int]]]:
    """Pieces, norms, parameters after the last step and bytes after each."""
    mesh = mesh_of(**degrees)
    model = Net()
    shards = Shards([model], whole_parts([model]), mesh, ShardOptions(**options))
    optimizer = adamw([piece.tensor for piece in shards.pieces])
    share = mesh.layout.dp_rank(rank)
    total = sum(map(sum, rows)) * 5
    norms, sizes = [], []
    for step in range(steps):
        run_passes(model, shards, [tokens_of(step, share, m, count) for m, count in enumerate(rows[share])], total)
        shards.finish_step()
        norms.append(shards.norm().item())
        shards.scale(min(1.0, clip / (norms[-1] + 1e-6)))
        optimizer.step()
        shards.publish()
        sizes.append(shards.storage_bytes())
    pieces = [(piece.part.name, piece.start, piece.stop, piece.tensor.detach().flatten()) for piece in shards.pieces]
    return pieces, norms, values_in_use(model, shards), sizes


def values_in_use(model: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """The parameters as an evaluation meets them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = {}

    def note(module: nn.Module, _: object) -> None:
        values.update({names[p]: p.detach().clone() for p in module.parameters(recurse=False)})

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    with shards.forward(0), torch.no_grad():
        loss_of(model, tokens_of(0, 0, 0, 1))
    for hook in hooks:
        hook.remove()
    return values


def run_passes(model: nn.Module, shards: Shards, batches: list[Tensor], total: int) -> None:
    """A step's forward and backward passes."""
    shards.begin_step()
    for number, tokens in enumerate(batches, start=1):
        with shards.forward(0):
            loss = loss_of(model, tokens) / total
        with shards.backward(0, number == len(batches)):
            loss.backward()  # type: ignore[no-untyped-call]


def launches(rank: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """For each of two steps: buckets sent before the last backward pass ended, and all of them."""
    model = Net()
    shards = Shards([model], whole_parts([model]), mesh_of(**degrees_for(2, options)), ShardOptions(**options))
    seen = []
    for step in range(2):
        shards.begin_step()
        with shards.forward(0):
            loss = loss_of(model, tokens_of(step, rank, 0, 2))
        with shards.backward(0, True):
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append((sum(bucket.launched for bucket in shards.buckets), len(shards.buckets)))
        shards.finish_step()
        shards.publish()
    return seen


def degrees_for(size: int, options: dict[str, Any]) -> dict[str, int]:
    return {"shard": size} if options.get("zero") else {"replicate": size}


class Branches(nn.Module):
    """Two branches, one of which may take no part in a pass, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor, right: bool = True) -> Tensor:
        x = self.shared(self.shared(x).tanh())
        out: Tensor = self.left(x).sum() + (self.right(x).sum() if right else 0)
        return out


def branch_inputs(rank: int, part: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + part))


def branch_gradients(
    rank: int, options: dict[str, Any], passes: list[int], rights: list[bool]
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Gradients of this rank's pieces after each of some steps in which rank r makes `passes[r]` passes."""
    model = Branches()
    mesh = mesh_of(**degrees_for(len(passes), options))
    shards = Shards([model], whole_parts([model]), mesh, ShardOptions(**options))
    seen = []
    for right in rights:
        shards.begin_step()
        for part in range(passes[rank]):
            with shards.forward(0):
                loss = model(branch_inputs(rank, part), right)
            with shards.backward(0, part == passes[rank] - 1):
                loss.backward()
        shards.finish_step()
        seen.append({piece.part.name: piece.tensor.grad.clone() for piece in shards.pieces})  # type: ignore[union-attr]
    return seen, shards.unused


def overflow(rank: int, zero: int) -> float:
    """The norm where one rank's gradient overflows fp16."""
    options = {"zero": zero, "storage": torch.float16}
    model = nn.Linear(4, 4, bias=False)
    shards = Shards([model], whole_parts([model]), mesh_of(**degrees_for(2, options)), ShardOptions(**options))
    shards.begin_step()
    with shards.forward(0), torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(1, 4)).float().sum() * (1e6 if rank else 1.0)
    with shards.backward(0, True):
        loss.backward()
    shards.finish_step()
    return shards.norm().item()


def late_reader(rank: int) -> bool:
    """The first rank writes as soon as it may; whether the second, which reads late, and both at last read rightly."""
    mesh = mesh_of(shared=True, shard=2)
    storage = SharedStorage(mesh, 2, 1, None)
    parameter = torch.nn.Parameter(torch.zeros(6))
    kind = Kind(torch.float32, torch.device("cpu"), (0,), None, False, False, None)
    (part,) = whole_parts([torch.nn.ParameterList([parameter])]).values()
    (rooms,) = storage.allocate([(kind, [(parameter, part)])])
    values = rooms.values
    assert values is not None
    right = True
    for step in range(1, 4):
        if rank == 1:
            time.sleep(0.1)
            right &= bool(values.eq(step - 1).all())
        storage.end_reading()
        storage.await_readers()
        if rank == 0:
            values.fill_(step)
        storage.end_writing()
    return right and bool(values.eq(3).all())
