"""Parameters that no rank's loss depends on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dthpc.errors import UserError
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.sharding.bucket import Bucket


class Unused:
    """Asks once, at the end of the first step, so that a layer that was left out of the model does not go unnoticed."""

    def __init__(self, mesh: Mesh, allowed: bool, stages_alone: bool = False) -> None:
        self.names: list[str] = []
        self._mesh = mesh
        self._allowed = allowed
        self._stages_alone = stages_alone
        self._asked = False

    def ask_once(self, buckets: Sequence[Bucket]) -> None:
        """Note the parameters without gradient; collective in the first step.

        Raises:
            UserError: there are some and they are not allowed; the same on all ranks.
        """
        if self._asked:
            return
        self._asked = True
        slots = [slot for bucket in buckets for slot in bucket.slots]
        device = slots[0].parameter.device if slots else torch.device("cpu")
        used = torch.tensor([slot.used for slot in slots], dtype=torch.uint8, device=device)
        for axis in ("shard", "replicate"):
            group = self._mesh.group(axis)
            if group is not None and slots:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        self.names = [slot.part.name for slot, flag in zip(slots, used.tolist(), strict=True) if not flag]
        names = self._everywhere(device)
        if names and not self._allowed:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise UserError(
                f"parameters got no gradient in the first step: {shown}",
                key="parallel.allow_unused",
                value=False,
                instead="take them out of the model or out of training (requires_grad=False), let the loss depend on "
                "them, or set parallel.allow_unused=true, so that they count as zero",
            )

    def _everywhere(self, device: torch.device) -> list[str]:
        """The names of all ranks."""
        world = self._mesh.world()
        if world is None or self._stages_alone or (self._mesh.size("pp") == 1 and self._mesh.size("tp") == 1):
            return sorted(self.names)
        count = torch.tensor(len(self.names), device=device)
        dist.all_reduce(count, group=world)
        if not count.item():
            return []
        lists: list[list[str]] = [[] for _ in range(dist.get_world_size(world))]
        dist.all_gather_object(lists, self.names, group=world)
        return sorted({name for names in lists for name in names})
