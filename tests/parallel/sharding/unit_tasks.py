"""What ranks do in the tests of units, which ZeRO 3 gathers one by one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding.tasks import mesh_of


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
