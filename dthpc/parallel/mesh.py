"""The device mesh, and the process group of each axis; passed to whatever communicates, never kept in a global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dthpc.comm.collectives import BufferPool, Channel
from dthpc.comm.hierarchical import HierarchicalAllReduce
from dthpc.comm.shared import Exchange, Meeting, share_memory
from dthpc.errors import UserError

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

    everyone: dist.ProcessGroup | None = None
    """The ranks of this mesh, where they are not all ranks."""

    timeout: timedelta | None = None
    """How long a collective may take in groups made for this mesh; None: torch's default."""

    memory: Mapping[str, Meeting] = field(default_factory=dict)
    """For each axis, whether its ranks share memory, and why or why not."""

    levels: HierarchicalAllReduce | None = None
    """All-reduce of the replicas in three steps, where they take it."""

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

    def channel(self, axis: str, pool: BufferPool | None = None) -> Channel | None:
        """The collectives of the ranks along an axis, over memory where they share it; None where this rank is alone.

        Args:
            axis: as in `group`.
            pool: as of a `Channel`.
        """
        group = self.group(axis)
        return None if group is None else Channel(group, pool, self.exchange(axis))

    def exchange(self, axis: str) -> Exchange | None:
        """The way over memory to the ranks along an axis; None: there is none, or this rank is alone."""
        return self.memory[axis].exchange if self.size(axis) > 1 and axis in self.memory else None

    def world(self) -> dist.ProcessGroup | None:
        """All ranks of this mesh; None for a single one."""
        if self.layout.world_size == 1:
            return None
        return self.everyone if self.everyone is not None else dist.group.WORLD

    def island(self) -> Mesh:
        """The mesh of the ranks that share this rank's place on `replicate`, for replicas that train on their own.

        Collective over those ranks. Where there is one replica, it is this mesh.
        """
        layout, mine = self.layout, self.index("replicate")
        if layout.replicate == 1:
            return self
        members = [rank for rank in range(layout.world_size) if layout.index(rank, "replicate") == mine]
        alone = replace(layout, replicate=1)
        everyone = None if len(members) == 1 else _make_group(members, layout.world_size, self.timeout, "island")
        return replace(self, layout=alone, rank=members.index(self.rank), everyone=everyone)


def make_mesh(
    layout: Layout,
    device_type: str,
    rank: int | None = None,
    timeout: timedelta | None = None,
    shared_memory: bool | str = False,
    backends: Mapping[str, str] | None = None,
) -> Mesh:
    """Make the mesh of a layout; collective, `torch.distributed` must be initialised where there are several ranks.

    A rank makes only the groups that it is in, one for each axis, and meets only their members for it: the work does
    not grow with the number of ranks.

    Args:
        layout: the degrees.
        device_type: `cpu` or `cuda`.
        rank: this process; None: what `torch.distributed` says.
        timeout: of the groups' collectives; None: that of the group of all ranks.
        shared_memory: whether ranks that compute on the CPUs of one host talk over memory; `auto`: where they can.
        backends: of axes that have another than the group of all ranks, as `new_group` takes them.

    Raises:
        ValueError: there are more or fewer ranks than the layout has.
        UserError: `shared_memory` is true, and ranks of an axis cannot share memory; the same on all ranks of it.
    """
    if layout.world_size == 1:
        return Mesh(layout, 0, device_type, None)
    from torch.distributed.device_mesh import DeviceMesh

    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"a layout of {layout.world_size} ranks ({layout.describe()}) on {dist.get_world_size()}")
    rank = dist.get_rank() if rank is None else rank
    timeout = timeout or _timeout_of_world(device_type)
    axes = [axis for axis in layout.order if layout.degree(axis) > 1]
    own = backends or {}
    groups = [
        _make_group(list(layout.ranks_along(rank, axis)), layout.world_size, timeout, axis, own.get(axis))
        for axis in axes
    ]
    ranks = torch.arange(layout.world_size, dtype=torch.int).view([layout.degree(axis) for axis in axes])
    # Of one dimension, torch takes the ranks from the group.
    places: dict[str, Any] = {"group": groups, "mesh": ranks} if len(groups) > 1 else {"group": groups[0]}
    mesh = DeviceMesh.from_group(device_type=device_type, mesh_dim_names=tuple(axes), **places)
    memory = _share(dict(zip(axes, groups, strict=True)), device_type, timeout) if shared_memory else {}
    for axis, meeting in memory.items():
        if shared_memory is True and meeting.exchange is None:
            raise UserError(
                f"the ranks along {axis} cannot share memory: {meeting.reason}",
                key="comm.shared_memory",
                value="true",
                instead="comm.shared_memory=auto, or a layout in which this axis stays within a node",
            )
    return Mesh(layout, rank, device_type, mesh, timeout=timeout, memory=memory)


# Pipeline ranks send to one neighbour at a time, which is no collective.
_ALONG_MEMORY = ("replicate", "shard", "cp", "tp")


def _share(groups: dict[str, Any], device_type: str, timeout: timedelta | None) -> dict[str, Meeting]:
    """Have ranks share memory, axis by axis."""
    wanted = {axis: group for axis, group in groups.items() if axis in _ALONG_MEMORY}
    if device_type != "cpu":
        return {axis: Meeting(None, f"tensors are on the {device_type}") for axis in wanted}
    seconds = timeout.total_seconds() if timeout is not None else dist.default_pg_timeout.total_seconds()
    return {axis: share_memory(group, seconds) for axis, group in wanted.items()}


def _make_group(
    ranks: list[int], world_size: int, timeout: timedelta | None, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    if len(ranks) == world_size and backend is None:
        world: Any = dist.group.WORLD
        return world  # type: ignore[no-any-return]
    # All ranks make their groups axis by axis, so that those of two axes never wait for each other in a circle.
    return dist.new_group(  # type: ignore[no-any-return]
        ranks, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=name
    )


def _timeout_of_world(device_type: str) -> timedelta | None:
    """The timeout of the group of all ranks, which torch does not hand on: its own default is half an hour."""
    world: Any = dist.group.WORLD
    try:
        options = world._get_backend(torch.device(device_type)).options
    except (AttributeError, RuntimeError):  # a backend without options, as torch's fake one
        return None
    return getattr(options, "_timeout", None)
