"""What ranks do in the tests of the parallel room."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dthpc.parallel.buckets import GradientBuckets


class Branches(nn.Module):
    """Two branches, one of which may take no part in a pass, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor, right: bool = True) -> torch.Tensor:
        x = self.shared(self.shared(x).tanh())
        out: torch.Tensor = self.left(x).sum() + (self.right(x).sum() if right else 0)
        return out


def inputs(rank: int, part: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + part))


def bucket_gradients(
    rank: int, bucket_bytes: int, passes: list[int], right: bool, steps: int = 2
) -> list[list[torch.Tensor]]:
    """Gradients after each of some steps in which rank r makes `passes[r]` backward passes."""
    model = Branches()
    buckets = GradientBuckets(model.parameters(), dist.group.WORLD, bucket_bytes)
    seen = []
    for _ in range(steps):
        buckets.zero()
        for part in range(passes[rank]):
            with buckets.last_backward(part == passes[rank] - 1):
                model(inputs(rank, part), right).backward()
        buckets.finish()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return seen


def launches_during_backward(rank: int, bucket_bytes: int) -> tuple[int, int]:
    """Buckets whose reduction had started before `finish`, and all of them."""
    model = Branches()
    buckets = GradientBuckets(model.parameters(), dist.group.WORLD, bucket_bytes)
    with buckets.last_backward():
        model(inputs(rank, 0)).backward()
    started = buckets._launched
    buckets.finish()
    return started, len(buckets.flat)


def mesh_facts(rank: int, dp: int) -> tuple[tuple[str, ...] | None, int, int]:
    """Names, size and this rank's place in the mesh of a layout."""
    from dthpc.parallel.layout import Layout

    mesh = Layout(world_size=dp, dp=dp).make_mesh("cpu")
    return mesh.mesh_dim_names, mesh.size(), mesh.get_local_rank("dp")


def weights_after_parallelize(rank: int) -> list[torch.Tensor]:
    """Parameters and buffers of a model that each rank draws differently, once they are made equal."""
    from omegaconf import OmegaConf

    from dthpc.parallel.apply import parallelize
    from dthpc.parallel.layout import Layout

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)
    layout = Layout(world_size=2, dp=2)
    config = OmegaConf.create({"parallel": {"bucket_mb": 1}, "precision": {"compute": "fp32"}})
    parallel = parallelize(model, layout, layout.make_mesh("cpu"), config)
    copies = parallel.begin_step()
    model(torch.randn(4, 3) + rank).sum().backward()
    parallel.finish_step()
    kept = [buffer.clone() for buffer in parallel.buffers]
    assert not torch.equal(copies[0], kept[0])
    copies = parallel.begin_step()
    model(torch.randn(4, 3) + rank)
    assert not torch.equal(parallel.buffers[0], kept[0])
    parallel.abandon_step(copies)
    assert all(torch.equal(a, b) for a, b in zip(parallel.buffers, kept, strict=True))
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def refusal_of_models(rank: int, how: str) -> str:
    """What each of three ranks says to models that differ on rank 2."""
    from omegaconf import OmegaConf

    from dthpc.errors import UserError
    from dthpc.parallel.apply import parallelize
    from dthpc.parallel.layout import Layout

    odd = rank == 2
    model = nn.Sequential(nn.Linear(3, 5 if odd and how == "shape" else 4))
    if odd and how == "more":
        model.append(nn.Linear(4, 4))
    if odd and how == "name":
        model = nn.Sequential()
        model.add_module("own", nn.Linear(3, 4))
    if odd and how == "dtype":
        model.register_buffer("seen", torch.zeros(1))
    elif how == "dtype":
        model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
    layout = Layout(world_size=3, dp=3)
    config = OmegaConf.create({"parallel": {"bucket_mb": 1}, "precision": {"compute": "fp32"}})
    try:
        parallelize(model, layout, layout.make_mesh("cpu"), config)
    except UserError as error:
        return str(error)
    return ""
