"""What ranks do in the tests of replicas that sum in levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dthpc.comm.hierarchical import make_levels
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding import tasks


def train(rank: int, hosts: list[str], options: dict[str, Any], rows: tasks.Rows, steps: int) -> dict[str, Tensor]:
    """Parameters after some steps of replicas on invented hosts."""
    mesh = tasks.mesh_of(replicate=len(hosts))
    group = mesh.group("replicate")
    assert group is not None
    levels = make_levels(group, timeout_s=30, memory=True, host=hosts[rank])
    assert levels.reduction is not None
    assert levels.reduction.node.exchange is not None  # ranks of one invented host do share memory
    model = tasks.Net()
    shards = Shards([model], whole_parts([model]), replace(mesh, levels=levels.reduction), ShardOptions(**options))
    optimizer = tasks.adamw([piece.tensor for piece in shards.pieces])
    total = sum(map(sum, rows)) * 5
    for step in range(steps):
        batches = [tasks.tokens_of(step, rank, micro, count) for micro, count in enumerate(rows[rank])]
        tasks.run_passes(model, shards, batches, total)
        shards.finish_step()
        shards.scale(min(1.0, 1.0 / (shards.norm().item() + 1e-6)))
        optimizer.step()
        shards.publish()
    return tasks.values_in_use(model, shards)


def without_levels(rank: int, hosts: list[str]) -> tuple[int, str]:
    """What ranks hear that cannot sum in levels."""
    group = torch.distributed.group.WORLD
    assert group is not None
    levels = make_levels(group, timeout_s=30, memory=False, host=hosts[rank])
    assert levels.reduction is None
    return levels.nodes, levels.reason
