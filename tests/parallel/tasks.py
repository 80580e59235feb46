"""What ranks do in the tests of how a model is spread over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dthpc.errors import UserError
from dthpc.models.gpt import GPT
from dthpc.models.losses import next_token
from dthpc.parallel.alike import check_alike
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.materialize import broadcast_values
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.model import ParallelModel
from tests.train.tasks import make_config

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 4, "heads": 4, "max_seq_len": 8}


class Norms(nn.Sequential):
    """A layer with running statistics, drawn and started by each rank as it likes."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self[1].running_mean.fill_(rank)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A loss of any outputs."""
    return outputs.square().sum(), len(targets)


def spread(model: nn.Module, loss: Any, **groups: Any) -> ParallelModel:
    """A model in the layout of a configuration."""
    config = make_config(**{"model": {"layers": 4}, **groups})
    return parallelize(model, loss, make_mesh(Layout.resolve(config, _size()), "cpu"), config, CPU)


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def weights_after_parallelize(rank: int) -> list[torch.Tensor]:
    """Parameters and buffers of a model that each rank draws differently, once they are made equal.

    On the way: buffers are the first rank's after a step, and those of before after one that is given up.
    """
    model = spread(Norms(rank), squares)
    copies = model.begin_step(0, 0)
    model.forward_backward([(torch.randn(4, 3) + rank, torch.zeros(4))], lambda: 8, None)
    model.finish_step()
    kept = [buffer.clone() for buffer in model.buffers]
    assert not torch.equal(copies[0], kept[0])
    copies = model.begin_step(1, 8)
    model.module(torch.randn(4, 3) + rank)
    assert not torch.equal(model.buffers[0], kept[0])
    model.abandon_step(copies)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers, kept, strict=True))
    return [*(p.detach() for p in model.module.parameters()), *model.module.buffers()]


def held(rank: int, meta: bool, parallel: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """The parts that a rank holds of a decoder, and their values, right after it was spread."""
    torch.manual_seed(17)
    with torch.device("meta" if meta else "cpu"):
        net = GPT(**SIZES)
    model = spread(net, next_token, parallel=parallel)
    return [(part, parameter.detach().clone()) for parameter, part in model.parts.items()]


def refusal_of_models(rank: int, how: str) -> str:
    """What each of three ranks says to models that differ on rank 2."""
    odd = rank == 2
    model = nn.Sequential(nn.Linear(3, 5 if odd and how == "shape" else 4))
    if odd and how == "more":
        model.append(nn.Linear(4, 4))
    if odd and how == "name":
        model = nn.Sequential()
        model.add_module("own", nn.Linear(3, 4))
    if how == "dtype":
        model.register_buffer("seen", torch.zeros(1, dtype=torch.float32 if odd else torch.int64))
    try:
        check_alike(model, dist.group.WORLD)
    except UserError as error:
        return str(error)
    return ""


def broadcast(rank: int) -> list[torch.Tensor]:
    """Parameters and buffers after the first rank's were given to all."""
    model = Norms(rank)
    broadcast_values(model, dist.group.WORLD)
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def facts(rank: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """What a model says of its rank's place."""
    with torch.device("meta"):
        net = GPT(**SIZES)
    model = spread(net, next_token, parallel=parallel, train={"global_batch": 8})
    return {
        "stages": model.stages,
        "last": model.holds_last_stage,
        "counts": model.counts_loss,
        "stream": model.random_stream,
        "passes": model.passes,
        "micro_batch": model.micro_batch,
        "elements": model.elements,
        "held": sum(parameter.numel() for parameter in model.parts),
    }


def trained_by(rank: int, largest: float | None, parallel: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
    """The gradient norm of a step, and by how much the update of plain descent of rate 1 moved this rank's pieces."""
    with torch.device("meta"):
        net = GPT(**SIZES)
    model = spread(net, next_token, parallel=parallel, train={"global_batch": 4})
    optimizer = torch.optim.SGD([piece.tensor for piece in model.shards.pieces], lr=1.0)
    before = [piece.tensor.detach().clone() for piece in model.shards.pieces]
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(2))
    first, count = model.layout.dp_rank(rank) * 4 // model.layout.dp, 4 // model.layout.dp
    mine = tokens[first : first + count]
    model.begin_step(0, first)
    model.forward_backward([(mine[:, :-1], mine[:, 1:])], lambda: 32, None)
    model.finish_step()
    norm = model.update(optimizer, largest)
    moved = [old - piece.tensor.detach() for old, piece in zip(before, model.shards.pieces, strict=True)]
    # Tied and equal copies count once.
    return norm, [m if p.part.counts else torch.zeros(0) for m, p in zip(moved, model.shards.pieces, strict=True)]


def evaluated(rank: int, parallel: dict[str, Any]) -> tuple[float, int]:
    """Sum of losses and number of targets of one batch, that all ranks have alike."""
    with torch.device("meta"):
        net = GPT(**SIZES)
    model = spread(net, next_token, parallel=parallel)
    tokens = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(2))
    return model.evaluate(tokens[:, :-1], tokens[:, 1:])
