"""The device mesh, and the process group of each axis; passed to whatever communicates, never kept in a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dthpc.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands on each axis, and whom it talks to there."""

    layout: Layout
    """The degrees."""

    rank: int
    """This process."""

    device_type: str
    """`cpu` or `cuda`."""

    device_mesh: DeviceMesh | None
    """torch's mesh over the axes of degree above 1; None for a single process."""

    def size(self, axis: str) -> int:
        """Degree of an axis: `pp`, `replicate`, `shard`, `cp` or `tp`."""
        return self.layout.degree(axis)

    def index(self, axis: str) -> int:
        """This rank's position on an axis."""
        return self.layout.index(self.rank, axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only on `axis`, in its order; None where this rank is alone."""
        if self.size(axis) == 1 or self.device_mesh is None:
            return None
        return self.device_mesh.get_group(axis)

    def world(self) -> dist.ProcessGroup | None:
        """All ranks; None for a single process."""
        return dist.group.WORLD if self.layout.world_size > 1 else None


def make_mesh(layout: Layout, device_type: str, rank: int | None = None) -> Mesh:
    """Make the mesh of a layout; collective, `torch.distributed` must be initialised where there are several ranks.

    Args:
        layout: the degrees.
        device_type: `cpu` or `cuda`.
        rank: this process; None: what `torch.distributed` says.
    """
    if layout.world_size == 1:
        return Mesh(layout, 0, device_type, None)
    from torch.distributed.device_mesh import init_device_mesh

    axes = [axis for axis in layout.order if layout.degree(axis) > 1]
    mesh = init_device_mesh(device_type, tuple(layout.degree(axis) for axis in axes), mesh_dim_names=tuple(axes))
    return Mesh(layout, dist.get_rank() if rank is None else rank, device_type, mesh)
