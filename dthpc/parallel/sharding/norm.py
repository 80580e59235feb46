"""The global norm of the gradients, every element of the whole model counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.parallel.mesh import Mesh
from dthpc.parallel.sharding.bucket import Bucket

ROW = 1024
"""Squares are added in fp32 over rows of as many elements, and in fp64 over rows: about six exact digits are lost in
one fp32 sum over millions."""


class Norm:
    """Knows which ranks hold different elements."""

    def __init__(self, mesh: Mesh, shards: int) -> None:
        """Prepare.

        Args:
            mesh: this rank's groups.
            shards: ranks that divide a bucket among them: the degree of `shard`, or 1.
        """
        self._contributes = mesh.index("replicate") == 0 and mesh.index("cp") == 0
        if shards == 1:
            self._contributes = self._contributes and mesh.index("shard") == 0
        self._group: dist.ProcessGroup | None = None
        if mesh.size("pp") > 1 or mesh.size("tp") > 1:
            self._group = mesh.world()
        elif shards > 1:
            self._group, self._contributes = mesh.group("shard"), True

    def of(self, buckets: Sequence[Bucket]) -> Tensor:
        """Euclidean norm (fp64 scalar), the same bits on all ranks; collective where they hold different elements."""
        device = buckets[0].share.device if buckets else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in buckets:
            assert bucket.update is not None
            for low, high in bucket.counted:
                total += sum_of_squares(bucket.update[low:high])
        if self._group is not None:
            if not self._contributes:
                total.zero_()
            every = torch.empty(dist.get_world_size(self._group), dtype=torch.float64, device=device)
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(every, total.reshape(1), group=self._group)
            total = every.sum()
        return total.sqrt()


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of the squares of `[n]`, fp64 scalar; infinite or NaN where an element is."""
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total
