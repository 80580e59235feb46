"""A small training job, whose every bit can be compared: dropout, AdamW, a schedule, a buffer."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dthpc.checkpoint.state import TrainingState, model_tensors, optimizer_tensors

WIDTH = 12


class Net(nn.Module):
    """An odd number of rows, so that shards are uneven, and a buffer that counts."""

    def __init__(self, hidden: int = 7, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, hidden, dtype=dtype), nn.Dropout(0.3), nn.Tanh(), nn.Linear(hidden, 3, dtype=dtype)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Float [B, WIDTH] to [B, 3]."""
        self.seen += len(batch)
        return self.body(batch)


@dataclass
class Job:
    """A live job."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    state: TrainingState


def build(kind: str = "plain", seed: int = 0, hidden: int = 7) -> Job:
    """A job that is `plain`, `ddp` or `fsdp`, on the ranks of the default group."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model: nn.Module = Net(hidden)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.body[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind != "plain":
        torch.manual_seed(1000 * seed + dist.get_rank())
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    state = TrainingState(model, optimizer, {"samples": 0}, {"schedule": scheduler})
    return Job(model, optimizer, scheduler, state)


def train(job: Job, first: int, last: int, rank: int = 0) -> None:
    """Steps `first` to `last` - 1; the batch depends on the step and the rank, the dropout on the generators."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(4, WIDTH, generator=generator)
        job.optimizer.zero_grad()
        job.model(batch).square().mean().backward()
        job.optimizer.step()
        job.scheduler.step()
        job.state.scalars["samples"] += 4


def fingerprint(job: Job) -> dict[str, str]:
    """A digest of the bits of every tensor of the state, gathered where it is sharded, and of every other value."""
    tensors = {**model_tensors(job.state), **optimizer_tensors(job.state)}
    digests = {}
    for key, tensor in tensors.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digests[key] = f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"
    groups = [{key: value for key, value in group.items() if key != "params"} for group in job.optimizer.param_groups]
    return {**digests, "groups": repr(groups), "scalars": repr((job.state.scalars, job.scheduler.state_dict()))}


def draws() -> tuple[float, float, float]:
    """What each generator of this process draws next."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))
