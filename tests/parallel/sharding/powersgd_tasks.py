"""What ranks do in the tests of PowerSGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding.tasks import mesh_of


class Wide(nn.Module):
    """Matrices that are worth approximating, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 20)
        self.second = nn.Linear(20, 24, bias=False)
        self.small = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.small(self.second(self.first(x).tanh())).square().mean()
        return out


def powersgd(rank: int, approximation: int, steps: int, resume_at: int | None) -> tuple[list[Tensor], list[float]]:
    """Parameters after some steps of SGD, and the error of each step's gradient; with a break that only named tensors
    outlast."""
    mesh, options = mesh_of(replicate=2), ShardOptions(powersgd_rank=approximation, bucket_bytes=2000)
    model = Wide()
    shards = Shards([model], whole_parts([model]), mesh, options)
    errors = []
    for step in range(steps):
        if step == resume_at:
            kept = {name: tensor.clone() for name, tensor in shards.extra_state().items()}
            values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model = Wide()
            model.load_state_dict(values)
            shards = Shards([model], whole_parts([model]), mesh, options)
            shards.load_extra_state(kept)
        shards.begin_step()
        data = [torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + other)) for other in range(2)]
        exact = torch.autograd.grad(model(data[0]) + model(data[1]), list(model.parameters()))
        with shards.backward(0, True):
            model(data[rank]).backward()
        shards.finish_step()
        gap = torch.stack([(piece.tensor.grad - g).norm() for piece, g in zip(shards.pieces, exact, strict=True)])  # type: ignore[operator]
        errors.append(gap.norm().item())
        with torch.no_grad():
            for piece in shards.pieces:
                piece.tensor.sub_(piece.tensor.grad, alpha=0.05)  # type: ignore[arg-type]
        shards.publish()
    return [parameter.detach() for parameter in model.parameters()], errors
