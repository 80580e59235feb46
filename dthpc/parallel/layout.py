"""The parallel degrees, checked against everything they must divide. Free of torch: the login node imports it.

Axes, from the outermost to the innermost by default:

    pp          pipeline: neighbouring stages exchange activations, the least traffic of all
    replicate   data parallel, whole replicas: gradients are reduced
    shard       data parallel, ZeRO: states are sharded over it
    cp          context parallel; of degree 1 in this version
    tp          tensor parallel: several exchanges in every layer, so it belongs inside a node

The data-parallel degree is replicate · shard. Without ZeRO `shard` is 1, and with it `replicate` is 1 unless hybrid
sharding is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dthpc.errors import raise_together
from dthpc.parallel.check import AXES, check, degrees_of, parallel_of
from dthpc.parallel.pipeline.names import chunks_of


@dataclass(frozen=True)
class Layout:
    """How the ranks divide the work. The product of the degrees is the number of ranks."""

    pp: int = 1
    """Pipeline degree."""

    replicate: int = 1
    """Data-parallel groups that each hold all states."""

    shard: int = 1
    """Data-parallel ranks over which states are sharded; 1 without ZeRO."""

    cp: int = 1
    """Context-parallel degree."""

    tp: int = 1
    """Tensor-parallel degree."""

    zero: int = 0
    """ZeRO stage."""

    sequence_parallel: bool = False
    """Whether the sequence is split over `tp` between matrices."""

    schedule: str = "1f1b"
    """Name of the pipeline schedule."""

    chunks: int = 1
    """Chunks of layers on each pipeline rank."""

    order: tuple[str, ...] = field(default=AXES)
    """Axes, outermost first."""

    @classmethod
    def resolve(cls, config: Any, world_size: int) -> Layout:
        """The layout of a configuration on that many ranks.

        Raises:
            UserError: the degrees do not fit; see `dthpc.parallel.check.check`.
        """
        raise_together(check(config, world_size))
        parallel = parallel_of(config)
        return cls(
            **degrees_of(config, world_size),
            zero=parallel.zero,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            schedule=parallel.schedule,
            chunks=chunks_of(parallel.schedule, parallel.chunks) if parallel.pp > 1 else 1,
            order=tuple(parallel.order),
        )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Data-parallel degree: into how many shares a global batch is cut."""
        return self.replicate * self.shard

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.chunks

    def degree(self, axis: str) -> int:
        """Degree of an axis."""
        degree: int = getattr(self, axis)
        return degree

    def index(self, rank: int, axis: str) -> int:
        """Position of a rank on an axis."""
        return rank // self.stride(axis) % self.degree(axis)

    def stride(self, axis: str) -> int:
        """Distance between neighbouring ranks on an axis: the product of the degrees inside it."""
        return math.prod(self.degree(other) for other in self.order[self.order.index(axis) + 1 :])

    def ranks_along(self, rank: int, axis: str) -> range:
        """The ranks that differ from this one only on an axis, itself among them, in the axis's order."""
        stride = self.stride(axis)
        first = rank - self.index(rank, axis) * stride
        return range(first, first + self.degree(axis) * stride, stride)

    def is_inside_nodes(self, axis: str, tasks_per_node: int) -> bool:
        """Whether no two ranks that talk along an axis are on different nodes, ranks filling node after node."""
        # Ranks come in blocks of stride · degree that share the outer axes; a node border inside one cuts a group.
        block = self.stride(axis) * self.degree(axis)
        return self.degree(axis) == 1 or self.world_size <= tasks_per_node or tasks_per_node % block == 0

    def dp_rank(self, rank: int) -> int:
        """Which share of each global batch a rank works on: `replicate` outside, `shard` inside."""
        return self.index(rank, "replicate") * self.shard + self.index(rank, "shard")

    def counts_data(self, rank: int) -> bool:
        """Whether a rank is the one that reports its share of the data: the first of those that work on the same."""
        return all(self.index(rank, axis) == 0 for axis in ("pp", "cp", "tp"))

    def describe(self) -> str:
        """The degrees in words, for records: `dp=4`, `pp=2 (1f1b) dp=2 zero=1 tp=2+sp`."""
        words = []
        if self.pp > 1:
            words.append(f"pp={self.pp} ({self.schedule}{f', {self.chunks} chunks' if self.chunks > 1 else ''})")
        hybrid = f" ({self.replicate}x{self.shard})" if min(self.replicate, self.shard) > 1 else ""
        words.append(f"dp={self.dp}{hybrid}")
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"tp={self.tp}{'+sp' if self.sequence_parallel else ''}"] if self.tp > 1 else []
        return " ".join(words)
