"""What ranks do in the tests of sharding."""

from __future__ import annotations

import time
from functools import partial
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


class Wide(nn.Module):
    """Matrices that are worth approximating, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 20)
        self.second = nn.Linear(20, 24, bias=False)
        self.small = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.small(self.second(self.first(x).tanh())).square().mean()
        return out


def powersgd(rank: int, approximation: int, steps: int, resume_at: int | None) -> tuple[list[Tensor], list[float]]:
    """Parameters after some steps of SGD, and the error of each step's gradient; with a break that only named tensors
    outlast."""
    mesh, options = mesh_of(replicate=2), ShardOptions(powersgd_rank=approximation, bucket_bytes=2000)
    model = Wide()
    shards = Shards([model], whole_parts([model]), mesh, options)
    errors = []
    for step in range(steps):
        if step == resume_at:
            kept = {name: tensor.clone() for name, tensor in shards.extra_state().items()}
            values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model = Wide()
            model.load_state_dict(values)
            shards = Shards([model], whole_parts([model]), mesh, options)
            shards.load_extra_state(kept)
        shards.begin_step()
        data = [torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + other)) for other in range(2)]
        exact = torch.autograd.grad(model(data[0]) + model(data[1]), list(model.parameters()))
        with shards.backward(0, True):
            model(data[rank]).backward()
        shards.finish_step()
        gap = torch.stack([(piece.tensor.grad - g).norm() for piece, g in zip(shards.pieces, exact, strict=True)])  # type: ignore[operator]
        errors.append(gap.norm().item())
        with torch.no_grad():
            for piece in shards.pieces:
                piece.tensor.sub_(piece.tensor.grad, alpha=0.05)  # type: ignore[arg-type]
        shards.publish()
    return [parameter.detach() for parameter in model.parameters()], errors


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


def abandon(rank: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a step, without and with one that was given up before it: after a forward pass and after a whole
    micro-batch."""
    seen = []
    for given_up in (False, True):
        model = Net()
        shards = Shards([model], whole_parts([model]), mesh_of(**degrees_for(2, options)), ShardOptions(**options))
        if given_up:
            shards.begin_step()
            with shards.forward(0):
                loss_of(model, tokens_of(7, rank, 0, 2))
            shards.abandon_step()
            shards.begin_step()
            with shards.forward(0):
                loss = loss_of(model, tokens_of(8, rank, 0, 2))
            with shards.backward(0, False):
                loss.backward()  # type: ignore[no-untyped-call]
            shards.abandon_step()
        run_passes(model, shards, [tokens_of(0, rank, 0, 2), tokens_of(0, rank, 1, 2)], 1)
        shards.finish_step()
        seen.append([piece.tensor.grad.clone() for piece in shards.pieces])  # type: ignore[union-attr]
    return seen[0], seen[1]


def deferred(rank: int, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Gradients of three steps of two micro-batches whose matrices' gradients are told later, outside autograd, and the
    buckets sent before the last of these passes ended."""
    model = Branches()
    shards = Shards([model], whole_parts([model]), mesh_of(**degrees_for(2, options)), ShardOptions(**options))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    seen, sent = [], []
    for _ in range(3):
        shards.begin_step()
        late = []
        for part in range(2):
            with shards.forward(0):
                loss = model(branch_inputs(rank, part))
            with shards.backward(0, False, complete=False):
                late.append(torch.autograd.grad(loss, matrices, retain_graph=True))
                loss.backward(inputs=vectors)
        for part in range(2):
            with shards.backward(0, part == 1):
                for parameter, gradient in zip(matrices, late[part], strict=True):
                    shards.ready(parameter, gradient)
                launched = sum(bucket.launched for bucket in shards.buckets)
        sent.append(launched)
        shards.finish_step()
        seen.append({piece.part.name: piece.tensor.grad.clone() for piece in shards.pieces})  # type: ignore[union-attr]
    return seen, sent


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


class TwoChunks(nn.Module):
    """A chunk that uses a matrix of the other chunk too, as tied embeddings in a V-shaped pipeline."""

    def __init__(self, shared: nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared = shared
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def two_chunks(rank: int | None, options: dict[str, Any]) -> list[list[Tensor]]:
    """Gradients of two steps, by this rank's pieces; of both ranks together by plain autograd where `rank` is None."""
    torch.manual_seed(3)
    shared = nn.Linear(4, 4)
    chunks = [TwoChunks(shared, 4), TwoChunks(shared, 5)]
    parameters = list(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()))
    if rank is None:
        for other in range(2):
            chunks[1](chunks[0](branch_inputs(other, 0)[:, :4])).square().sum().backward()
        return [[p.grad for p in parameters if p.grad is not None]] * 2
    parts = whole_parts([chunks[0]])
    for p, part in whole_parts([chunks[1]]).items():
        parts.setdefault(p, part.but(name=f"second.{part.name}"))
    shards = Shards(chunks, parts, mesh_of(**degrees_for(2, options)), ShardOptions(**options))
    order = {parts[p].name: number for number, p in enumerate(parameters)}
    steps = []
    for _ in range(2):
        shards.begin_step()
        with shards.forward(0):
            middle = chunks[0](branch_inputs(rank, 0)[:, :4])
        taken = middle.detach().requires_grad_()
        with shards.forward(1):
            loss = chunks[1](taken).square().sum()
        with shards.backward(1, True):
            loss.backward()
        with shards.backward(0, True):
            middle.backward(taken.grad)
        shards.finish_step()
        whole = [torch.full((p.numel(),), torch.nan) for p in parameters]
        for piece in shards.pieces:
            assert piece.tensor.grad is not None
            whole[order[piece.part.name]][piece.start : piece.stop] = piece.tensor.grad.flatten()
        steps.append([flat.view(parts[p].shape) for flat, p in zip(whole, parameters, strict=True)])
    return steps


def gathered(rank: int, how: str) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor], int]:
    """How many of five blocks are whole whenever one runs, in a step with ZeRO-3; pieces of gradients, what they should
    be, and how many blocks are whole after the step. `how`: activations are computed again within a block, or around
    it, or not at all."""
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = (checkpoint(block, x, use_reentrant=False) if how == "outside" else block(x)).tanh()
            return x

    model, plain = Deep(), Deep()
    plain.load_state_dict(model.state_dict())
    if how == "inside":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    shards = Shards([model], whole_parts([model]), mesh_of(shard=2), ShardOptions(zero=3))
    blocks = [bucket for bucket in shards.buckets if "blocks" in bucket.slots[0].part.name]
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(sum(bucket.gathered for bucket in blocks))

    for block in model.blocks:
        block.register_forward_pre_hook(count)
        block.weight.register_hook(count)  # type: ignore[operator]
    for _ in range(2):
        shards.begin_step()
        with shards.forward(0):
            loss = model(torch.ones(2, 4) * (rank + 1)).sum()
        with shards.backward(0, True):
            loss.backward()
        shards.finish_step()
    for other in range(2):
        plain(torch.ones(2, 4) * (other + 1)).sum().backward()
    wanted = {name: p.grad.flatten() for name, p in plain.named_parameters() if p.grad is not None}
    pieces = {p.part.name: p.tensor.grad.clone() for p in shards.pieces if p.tensor.grad is not None}
    expected = {p.part.name: wanted[p.part.name][p.start : p.stop] for p in shards.pieces}
    return seen, pieces, expected, sum(bucket.gathered for bucket in shards.buckets)


def reads(rank: int) -> tuple[bool, bool]:
    """Whether a block's weight reads as NaN within its forward pass, and outside."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shards = Shards([model], whole_parts([model]), mesh_of(shard=2), ShardOptions(zero=3))
    inside: list[bool] = []
    model[0].register_forward_pre_hook(lambda module, _: inside.append(bool(module.weight.isnan().any())))
    with shards.forward(0), torch.no_grad():
        model(torch.ones(1, 3))
    return inside[0], bool(model[0].weight.isnan().all())


def backward_outside(rank: int) -> None:
    """A backward pass that nobody gathers for."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shards = Shards([model], whole_parts([model]), mesh_of(shard=2), ShardOptions(zero=3))
    with shards.forward(0):
        loss = model(torch.ones(1, 3)).sum()
    loss.backward()


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
