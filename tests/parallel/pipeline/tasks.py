"""A small model, and what ranks do with it in the tests of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dthpc.errors import UserError
from dthpc.models.dropout import Dropout, DropoutStream, attach
from dthpc.models.pipeline import PipelineLayer
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh, make_mesh
from dthpc.parallel.pipeline import wires
from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.measure import measure
from dthpc.parallel.pipeline.runtime import execute
from dthpc.parallel.pipeline.schedule import Action, Kind, build
from dthpc.parallel.pipeline.stages import cut, deal
from dthpc.parallel.pipeline.stash import StashingWorker
from dthpc.parallel.pipeline.weights import WeightStore, defer_weights
from dthpc.parallel.pipeline.wires import SHORT, Wires, connect
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.dropout = Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            result: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return result
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        after: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return after


class Tower(nn.Module):
    """Tokens to logits: an embedding, blocks, and an output that may use the embedding's weight."""

    def __init__(self, blocks: int = 6, tied: bool = False, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block(dropout, recompute) for number in range(blocks)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))

    def pipeline_layers(self) -> list[PipelineLayer]:
        blocks = [PipelineLayer((f"blocks.{name}",), 6.0) for name in self.blocks]
        return [PipelineLayer(("embed",), 1.0), *blocks, PipelineLayer(("norm", "head"), 2.0)]


def summed_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    total = F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def batches_of(rows: Sequence[int], lengths: Sequence[int] = (LENGTH,)) -> list[MicroBatch]:
    """Micro-batches of so many samples each, whose lengths take turns."""
    batches, first = [], 0
    for number, count in enumerate(rows):
        shape = (2, count, lengths[number % len(lengths)])
        tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(number))
        batches.append(MicroBatch(tokens[0], tokens[1], count, range(first, first + count)))
        first += count
    return batches


@dataclass(frozen=True)
class Case:
    """One step of one layout."""

    schedule: str = "1f1b"
    chunks: int = 1
    rows: tuple[int, ...] = (2, 2, 2, 2)
    tied: bool = False
    dropout: float = 0.0
    recompute: bool = False
    bf16: bool = False
    run_empty: bool = False
    blocks: int = 6
    steps: int = 1
    forward_only: bool = False
    breaks: int | None = None
    lengths: tuple[int, ...] = (LENGTH,)
    short: int = SHORT

    @property
    def divisor(self) -> float:
        return float(max(1, sum(self.rows) * LENGTH))

    def model(self) -> Tower:
        return Tower(self.blocks, self.tied, self.dropout, self.recompute)

    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16)


class Breaking(nn.Module):
    """A stage that fails in some micro-batch."""

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x: Tensor) -> Tensor:
        if self.left == 0:
            raise ArithmeticError("this stage broke")
        self.left -= 1
        result: Tensor = self.inner(x)
        return result


@dataclass
class Outcome:
    """What a rank has after its steps."""

    loss: float
    counted: int
    gradients: dict[str, Tensor]
    peak_held: int
    peak_unsettled: int = 0
    peak_bytes: int = 0


def plain(rank: int, case: Case) -> Outcome:
    """The same without the pipeline's code."""
    model, total, counted = case.model(), 0.0, 0
    stream = DropoutStream(3)
    attach(model, stream)
    for _ in range(case.steps):
        total, counted = 0.0, 0
        for batch in batches_of(case.rows, case.lengths):
            if not batch.rows:
                continue
            stream.samples = batch.samples
            with case.autocast():
                loss, count = summed_loss(model(batch.inputs), batch.targets)
            (loss / case.divisor).backward()
            total, counted = total + loss.item(), counted + count
    return Outcome(total, counted, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, 0)


class Saved:
    """A tensor that a graph keeps; `alive` counts the bytes of all of them."""

    alive = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Saved.alive += self.size

    def __del__(self) -> None:
        Saved.alive -= self.size


class Counting(ModuleWorker):
    """Notes the most graphs, bytes and messages that were alive."""

    links: Links
    peak, peak_bytes, peak_unsettled = 0, 0, 0

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            output = super().forward(stage, micro_batch, x)
        self.peak = max(self.peak, self.held)
        self.peak_bytes = max(self.peak_bytes, Saved.alive)
        self.peak_unsettled = max(self.peak_unsettled, self.links.unsettled)
        return output


def piped(rank: int, case: Case, ranks: int) -> Outcome:
    """Some steps through the pipeline, without an update in between."""
    layout = Layout(pp=ranks, schedule=case.schedule, chunks=case.chunks)
    mesh = make_mesh(layout, "cpu")
    if case.breaks is not None:
        # The one that breaks may be gone before the others are there.
        torch.distributed.barrier()
    schedule = build(case.schedule, ranks, case.chunks, len(case.rows))
    model = case.model()
    chunks, parts = cut(model, mesh, deal(model, mesh, "auto"))
    stream = DropoutStream(3)
    for chunk in chunks:
        attach(chunk, stream)
    if case.breaks is not None and rank == ranks - 1:
        chunks[0] = Breaking(chunks[0], case.breaks)
    actions: Sequence[Action] = schedule.actions[rank]
    if case.forward_only:
        actions = [action for action in actions if action.kind is Kind.F]
    store = WeightStore() if any(action.kind is Kind.W for action in actions) else None
    if store is not None:
        defer_weights(chunks, store)
    worker = Counting(
        dict(zip(schedule.stages_of(rank), chunks, strict=True)),
        schedule.stages,
        summed_loss,
        autocast=case.autocast,
        stream=stream,
        store=store,
        run_empty=case.run_empty,
    )
    worker.links = links = Links(schedule, mesh.group("pp"), torch.device("cpu"), case.short)
    for _ in range(case.steps):
        with torch.set_grad_enabled(not case.forward_only):
            worker.begin(batches_of(case.rows, case.lengths), actions, lambda: case.divisor)
            execute(actions, worker, links)
    gradients = {parts[p].name: p.grad for p in parts if p.grad is not None}
    assert worker.held == links.unsettled == Saved.alive == 0
    return Outcome(worker.loss, worker.counted, gradients, worker.peak, worker.peak_unsettled, worker.peak_bytes)


class Changing(nn.Module):
    """Gives what cannot travel, the second time."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = inner, how, 0

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        self.calls += 1
        ways = {
            "tuple": lambda: (y, y),
            "integers": lambda: y.long(),
            "rows": lambda: torch.cat([y, y[:1]]),
            "later": lambda: y if self.calls == 1 else y[..., :2],
            "flat": lambda: y.flatten(0, 1),
        }
        return ways[self.how]()


def handed_over(rank: int, how: str) -> str:
    """What the first of two stages says to an output of that kind, or the shape in which the second gets it."""
    # One of them is gone at once, which the other must be there to see.
    torch.distributed.barrier()
    schedule = build("gpipe", 2, 1, 2)
    got: list[tuple[int, ...]] = []

    def note(x: Tensor) -> Tensor:
        got.append(tuple(x.shape))
        return x

    stages = {0: Changing(nn.Linear(3, 4), how), 1: nn.Linear(4, 1)}
    stages[1].register_forward_pre_hook(lambda module, inputs: note(inputs[0]))
    worker = ModuleWorker({rank: stages[rank]}, 2, lambda y, t: (y.sum(), 1))
    links = Links(schedule, torch.distributed.group.WORLD, torch.device("cpu"))
    batches = [MicroBatch(torch.ones(rows, 5, 3), None, rows) for rows in (2, 3)]
    worker.begin(batches, schedule.actions[rank])
    try:
        execute(schedule.actions[rank], worker, links)
    except UserError as error:
        return str(error)
    except RuntimeError:
        return "gone"
    return str(got)


def measured_stages(rank: int, seconds: list[float]) -> list[int]:
    """How three ranks deal layers when only the first one measures."""

    def measure() -> list[float]:
        assert rank == 0
        return seconds

    return deal(Tower(), make_mesh(Layout(pp=3), "cpu"), "measured", measure)


def measure_gpt(model: nn.Module) -> list[float]:
    """Seconds of a GPT's layers."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return measure(model, tokens, tokens, summed_loss, torch.device("cpu"), repeats=1)


RATE = 0.05


def piped_with_stash(rank: int, case: Case, ranks: int, steps: int) -> tuple[dict[str, Tensor], int]:
    """Parameters after some steps of PipeDream, and the most versions of weights that an update left stashed."""
    mesh = make_mesh(Layout(pp=ranks, schedule="pipedream"), "cpu")
    schedule = build("pipedream", ranks, 1, len(case.rows))
    model = case.model()
    (chunk,), parts = cut(model, mesh, deal(model, mesh, "auto"))
    optimizer = torch.optim.SGD(chunk.parameters(), lr=RATE)
    versions, updates = 0, []

    def update(stage: int, micro_batch: int) -> None:
        nonlocal versions
        versions = max(versions, worker.versions)
        updates.append((stage, micro_batch))
        optimizer.step()
        optimizer.zero_grad()

    worker = StashingWorker({rank: chunk}, ranks, summed_loss)
    worker.update = update
    links = Links(schedule, mesh.group("pp"), torch.device("cpu"))
    for _ in range(steps):
        worker.begin(batches_of(case.rows, case.lengths), schedule.actions[rank], lambda: case.divisor / len(case.rows))
        execute(schedule.actions[rank], worker, links)
    assert updates == [(rank, number) for number in range(len(case.rows))] * steps
    return {part.name: parameter.detach() for parameter, part in parts.items()}, versions


def plain_stale(rank: int, case: Case, ranks: int, steps: int) -> dict[str, Tensor]:
    """The same in one process, by the definition: which update's weights each micro-batch meets in each stage."""
    model, schedule = case.model(), build("pipedream", ranks, 1, len(case.rows))
    meshes = [Mesh(Layout(pp=ranks, schedule="pipedream"), stage, "cpu", None) for stage in range(ranks)]
    dealt = deal(model, meshes[0], "auto")
    stage_of = {p: mesh.rank for mesh in meshes for p in cut(model, mesh, dealt)[1]}
    for _ in range(steps):
        history = {p: [p.detach().clone()] for p in model.parameters()}
        for number, batch in enumerate(batches_of(case.rows, case.lengths)):
            for p, versions in history.items():
                p.data = versions[schedule.weight_version(stage_of[p], number)].clone()
            loss, _ = summed_loss(model(batch.inputs), batch.targets)
            gradients = torch.autograd.grad(loss / (case.divisor / len(case.rows)), list(history))
            for versions, gradient in zip(history.values(), gradients, strict=True):
                versions.append(versions[-1] - RATE * gradient)
        for p, versions in history.items():
            p.data = versions[-1]
    return {name: p.detach() for name, p in model.named_parameters()}


def wired(rank: int, per_host: int = 4) -> list[int]:
    """Which neighbours of four ranks in a row are connected, with so many to a host, and answer."""
    with patch.object(wires, "_host", lambda: ("host", "boot", rank // per_host)):
        neighbours = {rank - 1, rank + 1} & set(range(4))
        found = Wires(connect(torch.distributed.group.WORLD, neighbours), 20.0)
    peers = [peer for peer in range(4) if peer in found]
    place = found.place(torch.Size((1,)), torch.float32)
    for peer in peers:
        found.send(peer, rank, torch.tensor([float(rank)]), place)
    assert [found.receive(peer, peer, place).item() for peer in peers] == peers
    torch.distributed.barrier()
    found.close()
    return peers
