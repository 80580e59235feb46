"""The parallel degrees, checked against everything they must divide, and the device mesh made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError, raise_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLANNED = {
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "tp": "tensor parallelism",
}
"""Axes that the configuration can name but this version cannot run, outermost first."""


@dataclass(frozen=True)
class Layout:
    """How the ranks divide the work. The product of the degrees is the number of ranks."""

    world_size: int
    """Ranks in all."""

    dp: int
    """Data-parallel replicas: each trains on its share of every global batch."""

    @classmethod
    def resolve(cls, config: Any, world_size: int) -> Layout:
        """The layout of a configuration on that many ranks.

        Raises:
            UserError: the degrees do not fit; see `check`.
        """
        raise_together(check(config, world_size))
        return cls(world_size=world_size, dp=world_size)

    def dp_rank(self, rank: int) -> int:
        """Position of a rank on the data-parallel axis."""
        return rank // (self.world_size // self.dp)

    def make_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh, with one named dimension for each axis; `torch.distributed` must be initialised."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (self.dp,), mesh_dim_names=("dp",))

    def describe(self) -> str:
        """The degrees in words, for records: `dp=4`."""
        return f"dp={self.dp}"


def check(config: Any, world_size: int | None = None) -> list[UserError]:
    """Mistakes in `config.parallel` against the ranks and `config.train`; free of torch.

    Args:
        config: the whole configuration.
        world_size: ranks in all; None: every number of ranks that `config.cluster` may start.
    """
    errors = _find_unavailable(config.parallel)
    if errors:
        return errors
    for size in _possible_sizes(config.cluster) if world_size is None else [world_size]:
        errors = _check_degrees(config.parallel.get("dp"), size) or _check_batch(config.train, size)
        if errors:
            return errors
    return []


def _possible_sizes(cluster: Any) -> list[int]:
    """Smallest and largest number of ranks; empty where the numbers make no sense, which is told elsewhere."""
    try:
        ends = [int(end) for end in str(cluster.nodes).split("-", 1)]
    except ValueError:
        return []
    sizes = sorted({nodes * cluster.tasks_per_node for nodes in ends})
    return sizes if sizes[0] >= 1 else []


def _find_unavailable(parallel: Any) -> list[UserError]:
    errors = []
    for axis, words in PLANNED.items():
        degree = parallel.get(axis)
        if degree is not None and degree != 1:
            errors.append(
                UserError(
                    f"{words} is not available in this version",
                    key=f"parallel.{axis}",
                    value=degree,
                    instead=f"parallel.{axis}=1; data parallelism uses all ranks",
                )
            )
    if parallel.get("zero"):
        errors.append(
            UserError(
                "sharding of optimizer state, gradients and parameters (ZeRO) is not available in this version",
                key="parallel.zero",
                value=parallel.get("zero"),
                instead="parallel.zero=0",
            )
        )
    return errors


def _check_degrees(dp: int | None, world_size: int) -> list[UserError]:
    if dp is None or dp == world_size:
        return []
    return [
        UserError(
            f"the degrees multiply to {dp} (dp={dp}), but there are {world_size} ranks",
            key="parallel.dp",
            value=dp,
            instead=f"parallel.dp=null or parallel.dp={world_size}, or as many ranks as the degrees ask",
        )
    ]


def _check_batch(train: Any, dp: int) -> list[UserError]:
    whole, micro = train.global_batch, train.get("micro_batch")
    if whole < 1 or (micro is not None and not 1 <= micro <= whole):
        return []  # Told by the checks of each value's own range.
    if whole < dp:
        return [
            UserError(
                f"a global batch of {whole} samples leaves {dp - whole} of the {dp} data-parallel ranks without work "
                "in every step",
                key="train.global_batch",
                value=whole,
                instead=f"train.global_batch={dp} or more, or fewer ranks",
            )
        ]
    share = -(-whole // dp)
    if micro is not None and micro > share:
        return [
            UserError(
                f"a rank's share is {share} samples (train.global_batch={whole} over {dp} ranks), fewer than one "
                "micro-batch",
                key="train.micro_batch",
                value=micro,
                instead=f"train.micro_batch=null, or at most {share}",
            )
        ]
    return []
