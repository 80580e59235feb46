from __future__ import annotations

import torch
from torch import nn

from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding import tasks


class Sum(nn.Module):
    """Two parameters whose gradients autograd makes views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2, 3))
        self.second = nn.Parameter(torch.ones(6))

    def forward(self) -> torch.Tensor:
        return (self.first + self.second.view(2, 3)).square().sum()


def alone(model: nn.Module) -> Shards:
    return Shards([model], whole_parts([model]), tasks.mesh_of(), ShardOptions(bucket_bytes=1))


def test_a_gradient_that_is_a_bucket_by_itself_is_not_copied() -> None:
    model = nn.Linear(4, 4, bias=False)
    shards = alone(model)
    shards.begin_step()
    with shards.backward(0, True):
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    address = model.weight.grad.data_ptr()
    with shards.backward(0, False):
        pass
    shards.finish_step()
    assert model.weight.grad.data_ptr() == address == shards.buckets[0].share.data_ptr()


def test_gradients_that_share_memory_are_parted() -> None:
    model = Sum()
    shards = alone(model)
    shards.begin_step()
    with shards.backward(0, True):
        model().backward()
    shards.finish_step()
    shards.scale(0.5)
    assert model.first.grad is not None
    assert model.second.grad is not None
    assert model.first.grad.eq(2).all()
    assert model.second.grad.eq(2).all()


def test_gradients_add_up_over_passes_where_they_are() -> None:
    model = tasks.Branches()
    shards = alone(model)
    expected = tasks.Branches()
    for step in range(2):
        expected.zero_grad()
        shards.begin_step()
        for part in range(3):
            expected(tasks.branch_inputs(step, part)).backward()
            with shards.backward(0, part == 2):
                model(tasks.branch_inputs(step, part)).backward()
        shards.finish_step()
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_pieces_are_the_parameters_where_nothing_is_sharded_or_rounded() -> None:
    model = tasks.Net()
    shards = Shards([model], whole_parts([model]), tasks.mesh_of(), ShardOptions(zero=3))
    assert [piece.tensor for piece in shards.pieces] == list(model.parameters())
    assert all(piece.stop - piece.start == piece.tensor.numel() for piece in shards.pieces)
