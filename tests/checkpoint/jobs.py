"""A small training job, whose every bit can be compared: dropout, AdamW, a schedule, a buffer."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dthpc.checkpoint.replicas import state_shares
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import TrainingState

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
    """A job that is `plain`, `ddp` or `zero` (flat shards of fp32 masters), on the ranks of the default group."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model: nn.Module = Net(hidden)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind != "plain":
        torch.manual_seed(1000 * seed + dist.get_rank())
    pieces = flat_shards(model) if kind == "zero" else None
    named = [(len(p.shape), p.tensor) for p in pieces] if pieces else [(p.ndim, p) for p in model.parameters()]
    decayed = [parameter for dim, parameter in named if dim > 1]
    others = [parameter for dim, parameter in named if dim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    state = TrainingState(model, optimizer, {"samples": 0}, {"schedule": scheduler}, pieces=pieces)
    return Job(model, optimizer, scheduler, state)


def flat_shards(model: nn.Module) -> list[Share]:
    """This rank's part of each parameter, flattened and cut in equal parts, the last one shorter."""
    pieces = []
    for name, parameter in model.named_parameters():
        size = -(-parameter.numel() // dist.get_world_size())
        start = min(dist.get_rank() * size, parameter.numel())
        stop = min(start + size, parameter.numel())
        master = nn.Parameter(parameter.detach().flatten()[start:stop].clone())
        shape = tuple(parameter.shape)
        pieces.append(Share(name, shape, (0,) * len(shape), shape, start, stop, master))
    return pieces


def gather(job: Job) -> None:
    """Give the parameters of a `zero` job the values of all shards."""
    with torch.no_grad():
        for piece, parameter in zip(job.state.parameters(), job.model.parameters(), strict=True):
            whole = torch.zeros(parameter.numel())
            whole[piece.start : piece.stop] = piece.tensor
            dist.all_reduce(whole)
            parameter.copy_(whole.view(parameter.shape))


def share_gradients(job: Job) -> None:
    """Give each shard of a `zero` job its mean gradient over the ranks."""
    for piece, parameter in zip(job.state.parameters(), job.model.parameters(), strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        piece.tensor.grad = parameter.grad.flatten()[piece.start : piece.stop] / dist.get_world_size()
        parameter.grad = None


def train(job: Job, first: int, last: int, rank: int = 0) -> None:
    """Steps `first` to `last` - 1; the batch depends on the step and the rank, the dropout on the generators."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(4, WIDTH, generator=generator)
        job.optimizer.zero_grad()
        if job.state.pieces is not None:
            gather(job)
        job.model(batch).square().mean().backward()
        if job.state.pieces is not None:
            share_gradients(job)
        job.optimizer.step()
        job.scheduler.step()
        job.state.scalars["samples"] += 4


def fingerprint(job: Job) -> dict[str, str]:
    """A digest of the bits of every tensor of the state, gathered where it is sharded, and of every other value."""
    digests = {}
    for share in state_shares(job.state):
        whole = torch.zeros(math.prod(share.shape), dtype=share.tensor.dtype)
        whole[share.start : share.stop] = share.tensor.detach().flatten()
        if not share.is_whole:
            dist.all_reduce(whole)
        digests[share.name] = f"{whole.dtype} {share.shape} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"
    groups = [{key: value for key, value in group.items() if key != "params"} for group in job.optimizer.param_groups]
    return {**digests, "groups": repr(groups), "scalars": repr((job.state.scalars, job.scheduler.state_dict()))}


def draws() -> tuple[float, float, float]:
    """What each generator of this process draws next."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))
