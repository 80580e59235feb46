"""torch's own parallel training on the default group, whatever its back end is."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def batch(rank: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(wrapped: nn.Module, data: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(data).square().mean().backward()
        optimizer.step()


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }


def alone(size: int) -> dict[str, Tensor]:
    """What one process makes of all ranks' batches."""
    trained = model()
    train(trained, torch.cat([batch(rank) for rank in range(size)]))
    return whole(trained.state_dict())


def data_parallel(rank: int) -> dict[str, Tensor]:
    trained = model()
    # Small buckets: several collectives are under way during the backward pass.
    train(DistributedDataParallel(trained, bucket_cap_mb=0.002), batch(rank))  # type: ignore[arg-type]
    return whole(trained.state_dict())


def fully_sharded(rank: int) -> dict[str, Tensor]:
    trained: Any = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in trained:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    train(trained, batch(rank))
    return whole(trained.state_dict())


def tensor_parallel(rank: int) -> dict[str, Tensor]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    trained = parallelize_module(model(), mesh, plan)  # type: ignore[arg-type]
    train(trained, torch.cat([batch(other) for other in range(size)]))
    return whole(trained.state_dict())


def pipeline(rank: int) -> tuple[dict[str, Tensor], list[float]]:
    """One step of 1F1B; the gradients of this rank's stage, and the losses on the last."""
    size = dist.get_world_size()
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(batch(0))
    else:
        schedule.step(target=batch(1), losses=losses if rank == size - 1 else None)
    gradients = {name: p.grad.clone() for name, p in layers[rank].named_parameters() if p.grad is not None}
    return gradients, [float(loss.detach()) for loss in losses]


def checkpoint(rank: int, folder: str) -> list[bool]:
    """Save a sharded model, change it, load it."""
    trained: Any = model()
    fully_shard(trained, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(trained, batch(rank))
    saved = whole(trained.state_dict())
    dcp.save(copy.copy(trained.state_dict()), checkpoint_id=folder)
    train(trained, batch(rank))
    changed = whole(trained.state_dict())
    state = trained.state_dict()
    dcp.load(state, checkpoint_id=folder)
    trained.load_state_dict(state)
    loaded = whole(trained.state_dict())
    return [
        all(torch.equal(saved[name], loaded[name]) for name in saved),
        torch.equal(saved["0.weight"], changed["0.weight"]),
    ]
