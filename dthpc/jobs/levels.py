"""Whether replicas sum their gradients in one step or in three: decided in a run's first attempt, and kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.collectives import Pending
from dthpc.comm.hierarchical import Levels, compare, is_quicker, make_levels
from dthpc.comm.spread import refusal
from dthpc.parallel.mesh import Mesh
from dthpc.rundir import read_json, write_json

if TYPE_CHECKING:
    from dthpc.context import RankContext


def with_levels(mesh: Mesh, config: Any, context: RankContext) -> Mesh:
    """The mesh with a hierarchical all-reduce of its replicas where `comm.hierarchical` wants one; collective.

    Both ways round differently, and times do not come out the same again, but a run that resumes must: so what `auto`
    has decided lies in the run's folder, for each number of replicas and nodes.

    Args:
        mesh: where this rank stands.
        config: the whole configuration.
        context: this rank.

    Raises:
        UserError: `comm.hierarchical` is true, and the ranks are not spread so that it is possible; on all ranks.
    """
    wanted = config.comm.hierarchical
    group = mesh.group("replicate")
    if not wanted or group is None:
        return mesh
    memory = bool(config.comm.shared_memory) and mesh.device_type == "cpu"
    levels = make_levels(group, timeout_s=float(config.comm.timeout_s), memory=memory)
    possible = _everywhere(levels.reduction is not None, mesh)
    if wanted is True and not possible:
        raise refusal(levels.reason)
    chosen, why = possible, levels.reason
    if possible and wanted == "auto":
        chosen, why = _decide(levels, group, mesh, context)
    if context.events is not None:
        context.events.write("hierarchical", used=chosen, reason=why)
    return replace(mesh, levels=levels.reduction if chosen else None)


def _everywhere(value: bool, mesh: Mesh) -> bool:
    """Whether it holds on all ranks."""
    flag = torch.tensor(int(value), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MIN, mesh.world())
    return bool(flag.item())


def _decide(levels: Levels, group: dist.ProcessGroup, mesh: Mesh, context: RankContext) -> tuple[bool, str]:
    """Whether three steps are quicker, by what an earlier attempt has found or by a measurement; on all ranks alike."""
    path, case = context.run.levels, f"{mesh.size('replicate')} replicas on {levels.nodes} nodes"
    known: list[Any] = [read_json(path) or {} if context.is_first else None]
    dist.broadcast_object_list(known, 0)
    if case not in known[0]:
        assert levels.reduction is not None
        device = torch.device(mesh.device_type)
        times = compare(_in_one_step(group), levels.reduction.all_reduce, group, device)
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, mesh.world())
        found = [(int(size), float(flat), float(three)) for size, flat, three in slowest.tolist()]
        known[0][case] = {"used": is_quicker(found), "times": found}
        if context.is_first:
            write_json(path, known[0])
    kept = known[0][case]
    told = ", ".join(
        f"{size >> 10} KiB {flat * 1e3:.2f} and {three * 1e3:.2f} ms" for size, flat, three in kept["times"]
    )
    return bool(kept["used"]), f"{case}, in one step and in three: {told}"


def _in_one_step(group: dist.ProcessGroup) -> Any:
    def start(flat: Tensor) -> Pending:
        return Pending([dist.all_reduce(flat, group=group, async_op=True)])

    return start
