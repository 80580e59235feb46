"""What ranks do in the tests of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding.tasks import (
    Branches,
    Net,
    branch_inputs,
    degrees_for,
    loss_of,
    mesh_of,
    run_passes,
    tokens_of,
)


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
