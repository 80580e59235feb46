"""What ranks do in the tests of the mesh."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from dthpc.comm.shared import handshake
from dthpc.parallel.layout import AXES, Layout
from dthpc.parallel.mesh import make_mesh


def groups(rank: int, layout: Layout) -> dict[str, tuple[list[int], int] | None]:
    """For each axis, who told this rank its number in a gather over the group, and this rank's index there."""
    mesh = make_mesh(layout, "cpu")
    seen: dict[str, tuple[list[int], int] | None] = {}
    for axis in AXES:
        group = mesh.group(axis)
        if group is None:
            seen[axis] = None
            continue
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.size(axis))]
        dist.all_gather(gathered, torch.tensor([rank]), group=group)
        assert dist.get_rank(group) == mesh.index(axis)
        seen[axis] = ([int(member) for member in gathered], mesh.index(axis))
    return seen


def torch_mesh(rank: int, layout: Layout) -> tuple[tuple[str, ...], list[int], list[int], list[int]]:
    """torch's view: names, shape and coordinates of the mesh, and the ranks of its innermost axis."""
    mesh = make_mesh(layout, "cpu").device_mesh
    assert mesh is not None
    names = mesh.mesh_dim_names
    assert names is not None
    inner = mesh[names[-1]].mesh.tolist() if len(names) > 1 else mesh.mesh.tolist()
    return names, list(mesh.shape), list(mesh.get_coordinate() or []), inner


def timeouts(rank: int, layout: Layout, asked: timedelta | None) -> list[float]:
    """Seconds that a collective may take in the group of each axis."""
    mesh = make_mesh(layout, "cpu", timeout=asked)
    found = [mesh.group(axis) for axis in AXES if mesh.size(axis) > 1]
    options = [group._get_backend(torch.device("cpu")).options for group in found if group is not None]
    return [option._timeout.total_seconds() for option in options]


def twice(rank: int, layout: Layout) -> list[int]:
    """Sums of the ranks over `tp` in two meshes, the second made while the first lives."""
    meshes = [make_mesh(layout, "cpu") for _ in range(2)]
    sums = []
    for mesh in reversed(meshes):
        value = torch.tensor([rank])
        dist.all_reduce(value, group=mesh.group("tp"))
        sums.append(int(value))
    return sums


def island(rank: int, layout: Layout) -> tuple[list[int] | None, dict[str, tuple[int, int]], dict[str, list[int]]]:
    """The ranks of this rank's island, its size and index on each axis, and the ranks of the axes' groups."""
    mesh = make_mesh(layout, "cpu").island()
    world = mesh.world()
    groups = {axis: mesh.group(axis) for axis in AXES}
    if world is not None:
        dist.barrier(group=world)
    return (
        None if world is None else dist.get_process_group_ranks(world),
        {axis: (mesh.size(axis), mesh.index(axis)) for axis in AXES if mesh.size(axis) > 1},
        {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None},
    )


def whole_world(rank: int, layout: Layout) -> bool:
    """Whether an axis that all ranks are on uses their own group rather than another one."""
    mesh = make_mesh(layout, "cpu")
    return mesh.group("shard") is mesh.world() is dist.group.WORLD


def wrong_size(rank: int, layout: Layout) -> None:
    """A mesh for another number of ranks."""
    make_mesh(layout, "cpu")


def memory(rank: int, layout: Layout, asked: bool | str, device: str, elsewhere: int) -> dict[str, tuple[bool, str]]:
    """For each axis, whether its ranks share memory, and why; the last `elsewhere` ranks pretend to be elsewhere."""
    away = rank >= layout.world_size - elsewhere
    with patch.object(handshake, "_host", lambda: ("there" if away else "here", "", 0)):
        mesh = make_mesh(layout, device, shared_memory=asked)
    sums = {axis: channel for axis in mesh.memory if (channel := mesh.channel(axis)) is not None}
    for axis, channel in sums.items():
        assert (channel.exchange is None) == (mesh.memory[axis].exchange is None)
        if device == "cpu":
            flat = torch.ones(5)
            channel.all_reduce(flat).wait()
            assert flat.eq(mesh.size(axis)).all()
    return {axis: (met.exchange is not None, met.reason) for axis, met in mesh.memory.items()}
